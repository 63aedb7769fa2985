# GLM-4.7 has the shape of GLM-4.5. Sourced; see there.
source "$(dirname "${BASH_SOURCE[0]}")/glm4.5-355B-A32B.sh"
