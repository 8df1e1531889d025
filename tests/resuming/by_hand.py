"""A program that saves by hand, rightly or with a planted bug: what the harness itself is tested with."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import raydist as rd
from raydist.failpoints import failpoint
from tests.resuming.journal import Journal, state_digest

BATCHES = 12


def save(folder: Path, state: dict[str, Any], bug: str) -> None:
    """A new file, which replaces the old one when it is safe."""
    new = folder / "state.json" if bug == "name_first" else folder / "state.new"
    with new.open("w") as file:
        text = json.dumps(state)
        file.write(text[: len(text) // 2])
        file.flush()
        failpoint("checkpoint.within_file")
        file.write(text[len(text) // 2 :])
        file.flush()
        if bug != "no_flush":
            os.fsync(file.fileno())
    failpoint("checkpoint.before_rename")
    new.rename(folder / "state.json")
    failpoint("checkpoint.after_rename")
    if bug != "no_directory_flush":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def main() -> None:
    bug, (journal, data) = sys.argv[1], (Journal.of_environment(), rd.Dataset.range(BATCHES * 4).shuffle(20, seed=1))
    rows, weight, step = iter(data.batch(4)), torch.zeros(()), 0
    file = journal.folder / "state.json"
    if file.exists() and bug != "no_resume":
        state = json.loads(file.read_text())
        rows.load_state_dict(state["rows"])
        weight, step = torch.tensor(state["weight"]), state["step"]
    pause_s = 0.3 if bug == "slow" else 0.0
    time.sleep(pause_s)
    journal.begins(step)
    time.sleep(60 if bug == "hang" and step else pause_s)
    state = rows.state_dict()
    for batch in rows:
        step += 1
        weight = weight * 0.9 + batch.float().mean()
        journal.saw(step, batch.tolist())
        if bug == "early":
            journal.acknowledged(step)
        state = state if bug == "one_batch_off" else rows.state_dict()
        save(journal.folder, {"rows": state, "weight": weight.item(), "step": step}, bug)
        state = rows.state_dict()
        if bug != "early":
            journal.acknowledged(step)
        if bug == "raise" and step == 3:
            raise KeyError("planted")
    journal.ends(state_digest({"weight": weight}))


if __name__ == "__main__":
    main()
