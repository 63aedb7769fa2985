"""HF weights into Megatron and out of it: the same bits, whatever the family, dtype and layout."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.plain_megatron import build, parallel_layout, run_ranks
from tests.tiny import FAMILIES, make_model
from vime.errors import UserError
from vime.models import load_shape
from vime.platform.sockets import free_port

CASES = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
CASES += [("qwen3_moe", False), ("glm", False), ("glm4", False), ("glm4_moe", False), ("deepseek_v3", False)]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with parallel_layout():
        yield


def load(hf_dir: Path, dtype: str = "float32", **options: Any) -> Any:
    from vime.training.weights_io import load_hf_weights

    shape = load_shape(hf_dir)
    model = build(shape, dtype, **options)
    load_hf_weights([model], shape, hf_dir)
    return model


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "tied"), CASES)
def test_round_trip_is_bit_identical(tmp_path: Path, family: str, tied: bool, dtype: str) -> None:
    from vime.training.weights_io import hf_plan, hf_weights

    hf_dir = make_model(tmp_path, family, tied=tied, dtype=dtype)
    shape, model = load_shape(hf_dir), load(hf_dir, dtype)
    exported = {name: tensor.clone() for name, tensor in hf_weights([model], shape)}
    assert_same_bits(exported, load_file(hf_dir / "model.safetensors"))
    plan = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in exported.items()]
    assert hf_plan(shape, getattr(torch, dtype)) == plan


@pytest.mark.parametrize(("family", "tied"), [case for case in CASES if case[0] not in ("glm4", "deepseek_v3")])
def test_megatron_computes_what_transformers_computes(tmp_path: Path, family: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 50000.0}
    overrides = {"rope_parameters": scaling, "max_position_embeddings": 16384} if family == "llama" else {}
    hf_dir = make_model(tmp_path, family, tied=tied, **overrides)
    tokens = torch.randint(0, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(48, 48, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        ours = load(hf_dir).eval()(tokens, torch.arange(48).expand(2, -1), mask)
        theirs = AutoModelForCausalLM.from_pretrained(hf_dir).eval()(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert theirs.std() > 0.1


def test_bfloat16_weights_in_a_float32_model_are_exact(tmp_path: Path) -> None:
    from vime.training.weights_io import hf_weights

    hf_dir = make_model(tmp_path, dtype="bfloat16")
    exported = dict(hf_weights([load(hf_dir, "float32")], load_shape(hf_dir)))
    source = {name: tensor.float() for name, tensor in load_file(hf_dir / "model.safetensors").items()}
    assert_same_bits(exported, source)


def test_padded_vocabulary_is_zero_inside_and_absent_outside(tmp_path: Path) -> None:
    from vime.training.weights_io import hf_weights

    hf_dir = make_model(tmp_path, vocab_size=515)
    model = load(hf_dir, divisible_by=128)
    assert model.output_layer.weight.shape[0] == 640
    assert not model.output_layer.weight[515:].any()
    assert not model.embedding.word_embeddings.weight[515:].any()
    exported = dict(hf_weights([model], load_shape(hf_dir)))
    assert_same_bits(exported, load_file(hf_dir / "model.safetensors"))


def rewrite(hf_dir: Path, change: Any) -> Path:
    path = hf_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return hf_dir


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight"),
        (lambda t: t.update({"model.extra.weight": torch.ones(1)}), "unexpected tensors: model.extra.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"tensors of a wrong shape: model.norm.weight is \[3\] instead of \[64\]",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if "q_proj" in name or "k_proj" in name or "v_proj" in name],
            "missing tensors: .*q_proj.weight, .* and 1 more",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(UserError, match="do not fit its config.json: " + message):
        load(rewrite(make_model(tmp_path), change))


def test_an_explicit_copy_of_a_tied_head_and_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    load(rewrite(make_model(tmp_path, tied=True), add))


def test_layers_behind_the_last_one_are_exported_as_they_came(tmp_path: Path) -> None:
    from vime.training.weights_io import save_hf

    draft = {"model.layers.2.eh_proj.weight": torch.rand(64, 128), "model.layers.2.enorm.weight": torch.rand(64)}
    hf_dir = rewrite(make_model(tmp_path / "hf", "glm4_moe", dtype="bfloat16"), lambda tensors: tensors.update(draft))
    save_hf(tmp_path / "out", [load(hf_dir, "bfloat16")], load_shape(hf_dir), hf_dir)
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), load_file(hf_dir / "model.safetensors"))


def test_a_folder_without_safetensors_is_told(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path)
    (hf_dir / "model.safetensors").rename(hf_dir / "pytorch_model.bin")
    with pytest.raises(UserError, match="only safetensors can be read"):
        load(hf_dir)


def test_an_index_that_names_absent_files_is_told(tmp_path: Path) -> None:
    hf_dir = make_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"names files which are not there: model-00001-of-00002\.safetensors"):
        load(hf_dir)


def test_a_parameter_may_be_left_alone(tmp_path: Path) -> None:
    from vime.training.weights_io import load_hf_weights

    hf_dir = make_model(tmp_path)
    shape = load_shape(hf_dir)
    model = build(shape)
    before = model.output_layer.weight.detach().clone()
    load_hf_weights([model], shape, hf_dir, untouched=["output_layer.weight"])
    assert torch.equal(model.output_layer.weight, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_gives_the_same_logits_in_transformers(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vime.models import hf_folder
    from vime.training.weights_io import save_hf

    hf_dir, out = make_model(tmp_path / "hf", family, dtype="bfloat16"), tmp_path / "deep" / "out"
    monkeypatch.setattr(hf_folder, "MAX_SHARD_BYTES", 100_000)
    save_hf(out, [load(hf_dir, "bfloat16")], load_shape(hf_dir), hf_dir)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        a, b = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (hf_dir, out))
    assert torch.equal(a, b)
    text = "What is 3 + 4?"
    assert AutoTokenizer.from_pretrained(out).encode(text) == AutoTokenizer.from_pretrained(hf_dir).encode(text)
    assert load_shape(out) == load_shape(hf_dir)
    assert_same_bits(
        dict(_named(load(out, "bfloat16"))), dict(_named(load(hf_dir, "bfloat16")))
    )  # a sharded folder loads too


def _named(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()


def test_the_dtype_of_the_saved_folder_is_the_models(tmp_path: Path) -> None:
    from vime.training.weights_io import save_hf

    hf_dir = make_model(tmp_path / "hf", dtype="bfloat16")
    save_hf(tmp_path / "out", [load(hf_dir, "float32")], load_shape(hf_dir), hf_dir)
    assert load_shape(tmp_path / "out").dtype == "float32"
    save_hf(tmp_path / "out", [load(hf_dir, "bfloat16")], load_shape(hf_dir), hf_dir)  # replaces the model there
    assert load_shape(tmp_path / "out").dtype == "bfloat16"


def test_a_folder_that_is_no_model_is_not_overwritten(tmp_path: Path) -> None:
    from vime.training.weights_io import save_hf

    hf_dir = make_model(tmp_path / "hf")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    for target, message in ((tmp_path / "precious", "not empty and not a model"), (hf_dir, "original model's folder")):
        with pytest.raises(UserError, match=message):
            save_hf(target, [load(hf_dir)], load_shape(hf_dir), hf_dir)
    assert (tmp_path / "precious" / "thesis.txt").is_file()


RANKS = textwrap.dedent("""
    import json, os
    from pathlib import Path
    from tests.models.plain_megatron import build, parallel_layout
    from vime.models import load_shape

    for work in json.loads(os.environ["WORKS"]):
        hf_dir, out = Path(work["hf"]), Path(work["out"])
        print(out, flush=True)
        layout = {key: int(os.environ[key.upper()]) for key in ("rank", "world")}
        with parallel_layout(**layout, port=work["port"], **work["sizes"]):
            from vime.training.weights_io import load_hf_weights, save_hf
            shape = load_shape(hf_dir)
            model = build(shape, "bfloat16")
            load_hf_weights([model], shape, hf_dir)
            save_hf(out, [model], shape, hf_dir)
""")

Layout: TypeAlias = tuple[str, bool, int, dict[str, int]]
LAYOUTS: list[Layout] = [  # family, tied, ranks, and how they are divided
    ("qwen2", False, 2, {"tp": 2}),
    ("qwen3", True, 2, {"pp": 2}),
    ("llama", True, 4, {"tp": 2, "pp": 2}),
    ("glm4", False, 2, {"tp": 2}),
    ("deepseek_v3", False, 2, {"tp": 2, "etp": 2}),
    ("deepseek_v3", False, 4, {"pp": 2, "ep": 2}),
    ("qwen3_moe", False, 2, {"ep": 2}),
    ("qwen3_moe", False, 2, {"tp": 2, "etp": 2}),
    ("qwen3_moe", False, 4, {"tp": 2, "ep": 2}),
    ("qwen3_moe", False, 4, {"tp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", True, 4, {"pp": 2, "ep": 2}),
    ("glm4_moe", False, 2, {"ep": 2}),
    ("glm4_moe", False, 4, {"tp": 2, "ep": 2, "etp": 2}),
]
SLOW_LAYOUTS: list[Layout] = [
    ("llama", False, 2, {"tp": 2}),
    ("qwen2", True, 2, {"pp": 2}),
    ("qwen3", False, 2, {"tp": 2}),
    ("glm", False, 2, {"tp": 2}),
    ("glm", False, 2, {"pp": 2}),
    ("glm4", False, 2, {"pp": 2}),
    ("deepseek_v3", False, 4, {"tp": 2, "ep": 2}),
]


class Travels:
    """Models on their way through several ranks and back; those of as many ranks go through the same processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gone: set[str] = set()

    def folders(self, layout: Layout) -> tuple[Path, Path]:
        """Where the model was, and where it is again."""
        if _name(layout) not in self._gone:
            layouts = LAYOUTS if layout in LAYOUTS else SLOW_LAYOUTS
            self._go([each for each in layouts if each[2] == layout[2]])
        return self._hf(layout), self._out(layout)

    def _go(self, layouts: list[Layout]) -> None:
        self._gone.update(map(_name, layouts))  # now, because they fail together
        works = []
        for layout in layouts:
            family, tied, _, sizes = layout
            hf_dir = make_model(self._hf(layout), family, tied=tied, dtype="bfloat16", vocab_size=515)
            works.append({"hf": str(hf_dir), "out": str(self._out(layout)), "port": free_port(), "sizes": sizes})
        run_ranks(RANKS, layouts[0][2], timeout_s=250, WORKS=json.dumps(works))

    def _hf(self, layout: Layout) -> Path:
        return self._folder / _name(layout) / "hf"

    def _out(self, layout: Layout) -> Path:
        return self._folder / _name(layout) / "out"


def _name(layout: Layout) -> str:
    return "-".join(map(str, layout)).replace("'", "")


@pytest.fixture(scope="module")
def travels(tmp_path_factory: pytest.TempPathFactory) -> Travels:
    return Travels(tmp_path_factory.mktemp("travels"))


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_LAYOUTS)], ids=_name
)
def test_round_trip_over_several_ranks_is_bit_identical(travels: Travels, layout: Layout) -> None:
    before, after = travels.folders(layout)
    assert_same_bits(load_file(after / "model.safetensors"), load_file(before / "model.safetensors"))
