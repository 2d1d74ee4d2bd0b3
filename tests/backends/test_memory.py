"""Memory is estimated before any weight is read, and what cannot fit is refused (PRF-03)."""

from __future__ import annotations

import importlib
import json
import re

import pytest

from speclocal.checks import weight_sizes
from speclocal.core.memory import GIB, estimate, loaded_bytes, token_bytes
from speclocal.errors import ModelError, UsageError
from tests.backends.folders import answer, one_line
from tests.backends.play import ids

KINDS = ("llama", "gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe", "phi3", "cohere2")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_cache_is_as_large_as_estimated(lab, tmp_path, kind, bits):
    lab.save_config(kind, tmp_path)
    heads = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1} if bits else {}
    target = lab.new(kind, context=512, kv_bits=bits, **heads)
    target.prefill(ids(300))
    config = {**config_of(tmp_path), **heads}
    assert lab.cache_bytes(target) == 512 * token_bytes(config, bits, 4)
    assert lab.cache_bytes(target) == estimate(config, 0, 512, bits, 4).cache


def test_weights_are_as_large_as_estimated(lab, folder, build):
    """Stored in float32: what the folder holds is what is loaded; half of it in 16 bits."""
    stored = weight_sizes(folder)
    assert loaded_bytes(stored, None) == loaded_bytes(stored, 4) == 2 * loaded_bytes(stored, 2)
    (file,) = folder.glob("*.safetensors")
    assert 0.95 * file.stat().st_size < loaded_bytes(stored, None) < file.stat().st_size


@pytest.fixture
def backend(backend_name, monkeypatch):
    """The backend, with as much free memory as `free` says, and a note of what was loaded."""
    module = importlib.import_module(f"speclocal.backends.{backend_name}")
    original, module_loads = module.load_target, []

    def load_target(folder, *args, **options):
        module_loads.append(folder)
        return original(folder, *args, **options)

    monkeypatch.setattr(module, "load_target", load_target)

    def free(count):
        module_loads.clear()
        monkeypatch.setattr(module, "free_memory", lambda device: count)
        return module_loads

    return free


def needed(build, free, **settings):
    """Bytes that are asked for; nothing is loaded meanwhile."""
    loads = free(0)
    with pytest.raises(ModelError, match=r"not enough memory on cpu") as error:
        build(**settings)
    assert one_line(error) == 1
    assert not loads, "weights were read before the memory was looked at"
    value, unit = re.search(r": ([\d.]+) (MiB|GiB) needed", str(error.value)).groups()
    return float(value) * (GIB if unit == "GiB" else 2**20), str(error.value)


def test_a_model_too_large_is_refused_before_it_is_read(build, backend):
    need, text = needed(build, backend)
    assert "draft model" not in text
    assert "0.0 MiB free" in text
    free = backend(int(need + 2**18))
    assert answer(build(), n=5).token_ids
    assert len(free) == 1


def test_target_and_draft_model_are_looked_at_together(build, backend):
    alone, _ = needed(build, backend)
    both, text = needed(build, backend, name="draft chain")
    assert "target: weights" in text
    assert "draft model: weights" in text
    assert 1.9 * alone < both < 2.1 * alone
    backend(int((alone + both) / 2))
    assert answer(build(), n=5).token_ids
    with pytest.raises(ModelError, match="draft model"):
        build("draft chain")


def test_a_draft_model_named_later_is_looked_at_too(build, backend, draft_folder):
    backend(100 * GIB)
    made = build("ngram")
    loads = backend(2**20)
    with pytest.raises(ModelError, match="not enough memory"):
        made.set_drafter(f"draft_model:{draft_folder}")
    assert not loads
    assert made.header.drafter == "ngram"
    assert answer(made, n=5).token_ids


def test_more_context_needs_more(build, backend):
    """What is asked for must fit; of the model's own context only 2,048 tokens, and a notice tells."""
    short, _ = needed(build, backend, context=100)
    plain, _ = needed(build, backend)
    long, _ = needed(build, backend, context=4096)
    assert short < plain < long
    few, _ = needed(build, backend, context=4096, kv_bits=8)
    assert few < long
    notices = []
    backend(int((plain + long) / 2))
    made = build(notify=notices.append)
    assert made.header.context == 4096
    (notice,) = notices
    room = int(re.search(r"about (\d+) of this model's 4096", notice).group(1))
    assert 2048 <= room < 4096
    with pytest.raises(ModelError, match="--context"):
        build(context=4096)
    notices.clear()
    backend(int(long * 1.1))
    build(notify=notices.append)
    assert not notices


def test_16_bits_need_less(build, backend):
    full, _ = needed(build, backend)
    half, _ = needed(build, backend, dtype="bfloat16")
    assert half < 0.9 * full


def test_real_memory_is_told(backend_name, build):
    module = importlib.import_module(f"speclocal.backends.{backend_name}")
    assert module.on_cpu("cpu")
    assert 2**26 < module.free_memory("cpu") < 2**46


def test_wired_memory_is_for_apples_only(build):
    with pytest.raises(UsageError, match="--wired-limit without effect") as error:
        build(wired_limit=1.0)
    assert one_line(error) == 2
