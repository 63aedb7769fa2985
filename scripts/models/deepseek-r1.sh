# DeepSeek-R1 has the shape of DeepSeek-V3. Sourced; see there.
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
