"""Sizes as people write them, and what a client takes."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from fedclade import ConfigError, LocalTraining
from fedclade.core import memory_bytes
from fedclade.core.params import Layout
from fedclade.training import memory
from fedclade.training.memory import (
    RECEIVED,
    SHARE,
    SMALLEST,
    bytes_per_client,
    clients_in_cache,
    default_memory,
    hot_bytes,
    keep_freed_memory,
    updates_at_once,
)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        *(("2GB", 2 * 10**9), ("1.5 gib", 3 * 2**29), ("500MiB", 500 * 2**20), ("64kb", 64_000)),
        *(("100", 100), (100, 100), ("7 B", 7)),
    ],
)
def test_sizes_are_read_as_written(written, size):
    assert memory_bytes(written) == size


@pytest.mark.parametrize("written", ["much", "2 TB", "-1GB", "0", 0, -5, "", "0.5"])
def test_what_is_no_size_is_refused(written):
    text = f"memory should be a size such as 2GB, 500MiB or a number of bytes, got {written!r}"
    with pytest.raises(ConfigError, match=re.escape(text)):
        memory_bytes(written)


BEYOND_REASON = {
    "5,000 digits": "9" * 5000,
    "a number of 5,000 digits": 10**5000,
    "300 digits": f"{'9' * 300}GB",
}


@pytest.mark.parametrize(
    "written",
    [*BEYOND_REASON.values(), math.inf, math.nan, True, "9" * 19],
    ids=[*BEYOND_REASON, *map(str, range(4))],
)
def test_a_size_beyond_reason_is_refused(written):
    text = "memory should be a size such as 2GB, 500MiB or a number of bytes, got "
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        memory_bytes(written)
    assert len(str(error.value)) < 500


def test_the_default_is_a_quarter_of_the_machine_or_of_its_container(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)
    monkeypatch.setattr(
        memory.os, "sysconf", {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 10**6}.__getitem__
    )
    assert default_memory(torch.device("cpu")) == 10**9 // SHARE
    limit.write_text("max\n")
    assert default_memory(torch.device("cpu")) == 10**9 // SHARE
    limit.write_text("400000000\n")
    assert default_memory(torch.device("cpu")) == 10**8


def test_a_machine_that_does_not_tell_its_memory_is_taken_for_a_small_one(monkeypatch, tmp_path):
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(memory, "CGROUP_LIMIT", tmp_path / "none")
    monkeypatch.setattr(memory.os, "sysconf", unknown)
    assert default_memory(torch.device("cpu")) == SMALLEST // SHARE


@pytest.mark.parametrize(
    ("spec", "models"),
    [
        (LocalTraining(), 4),
        (LocalTraining(momentum=0.9, weight_decay=0.1), 4),
        (LocalTraining(mu=0.1), 5),
        (LocalTraining(clip_norm=1.0), 5),
        (LocalTraining(mu=0.1, clip_norm=1.0), 6),
    ],
)
def test_a_client_takes_its_model_some_times_and_what_the_backward_pass_needs_twice(spec, models):
    """Linear(6, 4) on 10 examples: 28 parameters; the input [10, 6] is kept."""
    module = nn.Linear(6, 4)
    assert bytes_per_client(module, Layout.of(module), torch.zeros(10, 6), spec) == 4 * (
        models * 28 + 2 * (10 * 6)
    )


def test_as_many_clients_as_have_their_parameters_in_the_cache():
    module = nn.Linear(1024, 512, bias=False)  # 2 MiB
    assert clients_in_cache(hot_bytes(module, Layout.of(module)), threads=1) == 2
    assert clients_in_cache(hot_bytes(module, Layout.of(module)), threads=3) == 6


def test_embeddings_need_no_cache_and_one_client_trains_in_any_case():
    wide = nn.Sequential(nn.Embedding(100_000, 64), nn.Linear(64, 8192, bias=False))
    assert clients_in_cache(hot_bytes(wide, Layout.of(wide)), threads=1) == 2
    alone = nn.Embedding(100_000, 64)
    assert clients_in_cache(hot_bytes(alone, Layout.of(alone)), threads=1) >= 1
    large = nn.Linear(2048, 2048)
    assert clients_in_cache(hot_bytes(large, Layout.of(large)), threads=1) == 1


def test_a_stream_receives_as_many_updates_as_train_together():
    """32 MiB on a CPU, an eighth of the budget where that is less; one at least."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert updates_at_once(1000, cpu, 2**40) == RECEIVED // 1000
    assert updates_at_once(1000, cpu, 80_000) == updates_at_once(1000, cuda, 80_000) == 10
    assert updates_at_once(1000, cpu, 1) == 1


@pytest.mark.skipif(
    sys.platform != "linux", reason="it is the C library of Linux that gives memory back"
)
def test_memory_that_is_freed_is_kept_on_request():
    program = f"""
import resource, sys, torch
from fedclade.training.memory import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty({2 * RECEIVED}, dtype=torch.uint8).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", program, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < faults() / 5


def test_another_c_library_keeps_what_it_likes(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    keep_freed_memory()
