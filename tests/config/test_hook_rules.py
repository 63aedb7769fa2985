"""Custom functions and names of parameters that do not go together."""

from __future__ import annotations

import pytest

from vime.config import resolve

HERE = "tests.config.sample_hooks"
CONVERT = ("--custom-convert-samples-to-train-data-path", f"{HERE}:convert")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*CONVERT, "--custom-reward-post-process-path", f"{HERE}:process"),
            "--custom-reward-post-process-path has no effect beside --custom-convert-samples-to-train-data-path",
        ),
        (
            (*CONVERT, "--exclude-zero-signal-groups"),
            "--exclude-zero-signal-groups has no effect beside --custom-convert",
        ),
        ((*CONVERT, "--overlong-buffer-len", "2"), "--overlong-buffer-len has no effect beside --custom-convert"),
        (
            ("--only-train-params-name-list", "a", "--freeze-params-name-list", "b"),
            "--only-train-params-name-list and --freeze-params-name-list exclude each other",
        ),
        (
            ("--update-weight-transport", "disk"),
            "--update-weight-transport disk needs --update-weight-disk-dir: a folder that trainer, driver and engines",
        ),
        (
            ("--update-weight-transport", "disk", "--update-weight-disk-dir", __file__),
            f"--update-weight-disk-dir {__file__}: is a file, not a folder",
        ),
        (("--update-weight-disk-dir", "a"), "--update-weight-disk-dir has no effect without --update-weight-transport"),
        (("--update-weight-disk-keep-files",), "--update-weight-disk-keep-files has no effect without --update-weight"),
        (
            ("--custom-update-weight-post-write-path", f"{HERE}:log"),
            "--custom-update-weight-post-write-path has no effect without --update-weight-transport disk",
        ),
        (("--freeze-params-name-list", "layers.(1"), "--freeze-params-name-list layers.(1: no regular expression ("),
    ],
)
def test_what_contradicts_itself_is_refused(flags, words, message):
    (violation,) = resolve(flags(*words)).violations
    assert violation.startswith(message)


def test_a_flag_of_several_functions_may_be_given_again(flags):
    words = ["--rollout-sample-hook", "a:b", "c:d", "--rollout-sample-hook", "e:f"]
    assert resolve(flags(*words)).config.hooks.rollout_sample_hook == ("a:b", "c:d", "e:f")
