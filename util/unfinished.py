"""The state of a long linear probe, so that an interrupted one can go on where it was."""

from pathlib import Path

from util import checkpoint as ckpt
from util.misc import UserError, gather_objects, is_main_process, logger


class Unfinished:
    """One file, written after every epoch and removed at the end. Without a path nothing is kept.

    `identity` holds the settings that must be the same for a probe to be continued.
    """

    def __init__(self, path: Path | None, identity: dict, resume: bool):
        self.path, self.identity = path, identity
        if path is not None and path.exists() and not resume:
            raise UserError(f"{path} is an unfinished probe; add --resume auto to continue it, or delete it")

    def load(self) -> dict | None:
        """What `save` was last given, or None at the very beginning."""
        there = gather_objects(self.path is not None and self.path.exists())
        if not any(there):
            return None
        if not all(there):
            raise UserError(f"only some processes see {self.path}; put --output_dir on a disk that all share")
        state = ckpt.load_checkpoint(self.path)
        theirs = state.get("identity", {})
        if differing := [name for name, value in self.identity.items() if theirs.get(name) != value]:
            raise UserError(f"{self.path} was begun with another {', '.join(differing)}; delete it to start over")
        logger.info("continuing %s after epoch %d", self.path, state["epoch"])
        return state

    def save(self, state: dict) -> None:
        if self.path is not None and is_main_process():
            ckpt.save_checkpoint(self.path, {**state, "identity": self.identity})

    def remove(self) -> None:
        if self.path is not None and is_main_process():
            self.path.unlink(missing_ok=True)
