"""A run's curves and options in trackio, which keeps them on this machine; `trackio show` shows them."""

import secrets
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError

TRACKIO_ID = "trackio_id"  # a file of the run folder with the name by which a resumed run finds its curves


class Trackio:
    """A run at trackio."""

    def __init__(self, folder: Path, config: Config, options: Mapping[str, Any]):
        """config: names project and group. options: are shown there. Raises UserError."""
        try:
            import trackio
        except ImportError as error:
            raise UserError(
                f"trackio={config.trackio} needs the package trackio ({error}): pip install trackio"
            ) from None
        self._finish = trackio.finish  # also forgets the run, which the package would finish at exit
        path, self._project = folder / TRACKIO_ID, config.trackio
        self.id = path.read_text(encoding="utf-8") if path.exists() else f"{folder.name}-{secrets.token_hex(4)}"
        with redirect_stdout(StringIO()):
            self._run = trackio.init(
                project=config.trackio,
                name=self.id,
                group=config.logging.group or None,
                config=dict(options),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        path.write_text(self.id, encoding="utf-8")

    @property
    def place(self) -> str:
        """The command that shows the run, and its name."""
        return f"trackio show --project {self._project}, run {self.id}"

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._finish()
