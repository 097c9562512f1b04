"""A run's curves and options in MLflow. Points of iterations that a resumed run repeats stand there twice."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError

MLFLOW_ID = "mlflow_id"  # a file of the run folder with the id by which a resumed run finds its curves
MOST_PARAMS, LONGEST_PARAM = 100, 500  # of a request, characters of each
RETRIES, TIMEOUT_S = "3", "30"  # of a request to a server


class Mlflow:
    """A run at MLflow."""

    def __init__(self, folder: Path, config: Config, options: Mapping[str, Any]):
        """config: names experiment, group and tags. options: are shown there. Raises UserError."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", RETRIES)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", TIMEOUT_S)
        try:
            import mlflow
        except ImportError as error:
            raise UserError(f"mlflow={config.mlflow} needs the package mlflow ({error}): pip install mlflow") from None
        self._metric, path = mlflow.entities.Metric, folder / MLFLOW_ID
        try:
            self._client = mlflow.MlflowClient()
            if path.exists():
                self.id = path.read_text(encoding="utf-8")
                self._client.update_run(self.id, status="RUNNING")
                return
            found = self._client.get_experiment_by_name(config.mlflow)
            experiment = found.experiment_id if found else self._client.create_experiment(config.mlflow)
            logging = config.logging
            tags = dict.fromkeys(logging.tags, "") | ({"group": logging.group} if logging.group else {})
            self.id = self._client.create_run(experiment, run_name=folder.name, tags=tags).info.run_id
            params = [mlflow.entities.Param(name, str(value)[:LONGEST_PARAM]) for name, value in options.items()]
            for start in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self.id, params=params[start : start + MOST_PARAMS])
        except mlflow.exceptions.MlflowException as error:
            text = f"mlflow={config.mlflow}: MLflow can't be used ({str(error).strip()})"
            raise UserError(f"{text}; set MLFLOW_TRACKING_URI") from None
        path.write_text(self.id, encoding="utf-8")

    @property
    def place(self) -> str:
        """The run's experiment and id."""
        return f"run {self.id} of {self._client.tracking_uri}"

    def add(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        names = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in values.items()}  # those that MLflow allows
        self._client.log_batch(self.id, metrics=[self._metric(name, x, now, step) for name, x in names.items()])

    def close(self) -> None:
        self._client.set_terminated(self.id)
