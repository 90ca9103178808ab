"""Hugging Face folders: everything is read, nothing guessed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_tokenizer, write_tiny_model
from tokenizers import processors

from edgellm.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from edgellm.exporters.hf import load_hf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)


def change(path: Path, update: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    update(content)
    path.write_text(json.dumps(content))


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def update(content: dict[str, Any]) -> None:
        for key in keys:
            content.pop(key, None)

    return update


def test_text_files_are_carried_verbatim(folder: Path) -> None:
    model = load_hf(folder)
    assert model.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert model.generation_config == (folder / "generation_config.json").read_bytes()
    assert model.chat_templates == {"default": CHAT_TEMPLATE}
    assert {path.name for path in model.files} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert not model.tokenizer.is_synthesised
    assert model.tokenizer.special_tokens == {
        "bos_token": "<|start|>", "eos_token": "<|stop|>", "pad_token": "<|end|>"
    }  # fmt: skip


def test_the_list_of_end_tokens_is_generation_config_s(folder: Path) -> None:
    assert load_hf(folder).tokenizer.eos_ids == (2, 0)


def test_without_generation_config_it_is_config_s_then_the_tokenizer_s(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", lambda c: c.update(eos_token_id=[0, 1, 0]))
    assert load_hf(folder).tokenizer.eos_ids == (0, 1)
    change(folder / "config.json", lambda c: c.update(eos_token_id=0))
    assert load_hf(folder).tokenizer.eos_ids == (0,)
    change(folder / "config.json", drop("eos_token_id"))
    assert load_hf(folder).tokenizer.eos_ids == (2,)
    change(folder / "tokenizer_config.json", drop("eos_token"))
    with pytest.raises(FormatError, match="does not say which token ends an answer"):
        load_hf(folder)


@pytest.mark.parametrize("value", [-1, 10**6, "2", True, 2.0, [2, None]])
def test_an_end_token_that_is_none_is_refused(folder: Path, value: Any) -> None:
    change(folder / "generation_config.json", lambda c: c.update(eos_token_id=value))
    with pytest.raises(FormatError, match=r"eos_token_id .* is not one of"):
        load_hf(folder)


def test_bos_is_as_the_config_says_else_as_the_tokenizer_does(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    assert not load_hf(folder).tokenizer.add_bos
    change(config, lambda c: c.update(add_bos_token=True))
    assert load_hf(folder).tokenizer.add_bos
    change(config, drop("add_bos_token"))
    assert not load_hf(folder).tokenizer.add_bos
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    info = load_hf(folder).tokenizer
    assert (info.add_bos, info.bos_id) == (True, 1)


def test_special_tokens_may_be_objects_or_in_a_file_of_their_own(folder: Path) -> None:
    change(folder / "tokenizer_config.json", drop("bos_token", "pad_token", "eos_token"))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|start|>", "lstrip": False}, "pad_token": None})
    )
    info = load_hf(folder).tokenizer
    assert info.special_tokens == {"bos_token": "<|start|>"}
    assert info.bos_id == 1


def test_templates_are_found_in_every_place(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    change(
        config,
        lambda c: c.update(
            chat_template=[
                {"name": "default", "template": "from the list"},
                {"name": "tool_use", "template": "tools"},
            ]
        ),
    )
    assert load_hf(folder).chat_templates == {"default": "from the list", "tool_use": "tools"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_hf(folder).chat_templates["default"] == "from json"
    (folder / "chat_template.jinja").write_bytes(b"from jinja\r\n")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("documents")
    model = load_hf(folder)
    assert model.chat_templates == {
        "default": "from jinja\r\n", "tool_use": "tools", "rag": "documents"
    }  # fmt: skip
    assert more / "rag.jinja" in model.files
    for path in (folder / "chat_template.jinja", folder / "chat_template.json"):
        path.unlink()
    (more / "rag.jinja").unlink()
    change(config, drop("chat_template"))
    assert load_hf(folder).chat_templates == {}


@pytest.mark.parametrize("value", [5, [{"name": "x"}], ["x"]])
def test_a_template_that_is_no_text_is_refused(folder: Path, value: Any) -> None:
    change(folder / "tokenizer_config.json", lambda c: c.update(chat_template=value))
    with pytest.raises(FormatError, match="chat_template is not a"):
        load_hf(folder)


def test_rows_without_a_token_are_counted(folder: Path) -> None:
    model = load_hf(folder)
    assert model.description.num_tokens == tiny_tokenizer().get_vocab_size()
    assert model.description.vocab_size == model.description.num_tokens + 9


def test_added_tokens_without_a_row_are_left_out(tmp_path: Path) -> None:
    count = tiny_tokenizer().get_vocab_size()
    folder = write_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1, vocab_size=count)
    change(
        folder / "tokenizer.json",
        lambda c: c["added_tokens"].append({**c["added_tokens"][0], "id": count, "content": "<x>"}),
    )
    assert load_hf(folder).description.num_tokens == count


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1, vocab_size=100)
    with pytest.raises(FormatError, match="do not belong together"):
        load_hf(folder)


def shard(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map.update(dict.fromkeys(chosen, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def test_shards_are_one_model(folder: Path) -> None:
    whole = load_hf(folder).tensors
    names = dict(whole.shapes)
    rows = {name: whole.rows(name, 0, 1) for name in names}
    index = shard(folder)
    model = load_hf(folder)
    assert model.tensors.shapes == names
    assert all(np.array_equal(model.tensors.rows(name, 0, 1), rows[name]) for name in names)
    assert index in model.files
    assert sum(path.suffix == ".safetensors" for path in model.files) == 2


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_hf(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin"])
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, name: str) -> None:
    index = shard(folder)
    change(index, lambda c: c["weight_map"].update(extra=name))
    with pytest.raises(FormatError, match="not a safetensors file beside it"):
        load_hf(folder)


def test_an_index_that_is_wrong_is_refused(folder: Path) -> None:
    index = shard(folder)
    change(index, lambda c: c["weight_map"].update(extra="model-00001-of-00002.safetensors"))
    with pytest.raises(FormatError, match="does not hold 'extra'"):
        load_hf(folder)
    index.write_text("{}")
    with pytest.raises(FormatError, match="no weight_map"):
        load_hf(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    index = shard(folder)
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    save_file({**load_file(second), **load_file(first)}, second)
    with pytest.raises(FormatError, match="is in both"):
        load_hf(index.parent)


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_pickles_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    trap = folder / "trap"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(str(trap))))
    with pytest.raises(UnsupportedModelError, match=r"safetensors\.torch\.save_file"):
        load_hf(folder)
    assert not trap.exists()


def test_what_is_missing_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "x")
    with pytest.raises(FormatError, match=r"neither model\.safetensors nor"):
        load_hf(folder)
    (folder / "x").rename(folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match=r"no tokenizer\.json: download"):
        load_hf(folder)
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"tokenizer\.model but no tokenizer\.json; make it"):
        load_hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_hf(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_git_lfs_pointer_is_recognised(folder: Path, name: str) -> None:
    (folder / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )
    with pytest.raises(FormatError, match="run git lfs pull"):
        load_hf(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}', "\x00", "NaN"])
def test_broken_json_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(FormatError, match=name) as caught:
        load_hf(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_load_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "9"}')
    with pytest.raises(FormatError, match="not a tokenizer that can be loaded"):
        load_hf(folder)


def test_special_tokens_of_the_fixture_are_known() -> None:
    tokenizer = tiny_tokenizer()
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
