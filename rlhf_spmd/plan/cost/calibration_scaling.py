"""Scales a calibration of another machine to the machine at hand, where a few of its numbers are measured again.

Measured are passes, optimizer steps and generation of a small model of a shape in the calibration's tables, as in
`profile` (runtime/profile/calibration_probe.py). The ratio to the tables scales all seconds of the same kind. Kinds
have factors of their own, because processors do not differ by one number: without wide vectors, softmax and SwiGLU take
six times as long, and the interpreter as long as before. Seconds of messages are kept: ranks that share cores mostly
wait for their turn in them, which `num_workers` covers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rlhf_spmd.plan.cost.calibration import Calibration, Device, Measured
from rlhf_spmd.plan.cost.seconds import Lengths

NUM_LAYERS = 3  # of the model that is measured again
NUM_TOKENS = 8  # that it generates for each prompt
NUM_ROWS = (16, 4, 1)  # of the model; the most with which a round takes no more than ROUND_S
ROUND_S = 0.15  # seconds of all pieces by the calibration


@dataclass(frozen=True, slots=True)
class Pieces:
    """Seconds of the measurements. inference: a forward pass. training: forward, backward and update. generation:
    NUM_TOKENS tokens for each row."""

    inference: float
    training: float
    generation: float

    @property
    def sum(self) -> float:
        """Seconds of a round."""
        return self.inference + self.training + self.generation


def expected(table: Measured, rows: Lengths) -> Pieces:
    """Returns seconds of the pieces by a table with prefill and decode; rows: tokens of prompt and response."""
    assert table.prefill and table.decode
    tokens, prompts = sum(map(sum, rows)), sum(prompt for prompt, _ in rows)
    update_s = table.update.at(replace(table.shape, num_layers=NUM_LAYERS).num_params)
    return Pieces(
        table.forward.at(NUM_LAYERS, tokens, tokens / len(rows)),
        table.train.at(NUM_LAYERS, tokens, tokens / len(rows)) + update_s,
        table.prefill.at(NUM_LAYERS, prompts, prompts / len(rows))
        + (NUM_TOKENS - 1) * table.decode.at(NUM_LAYERS, len(rows)),
    )


def probed_table(device: Device) -> Measured | None:
    """Returns the table to measure again: of the smallest model that generates, with tp 1; None if there is none."""
    known = [one for one in device.measured if one.tp == 1 and one.prefill and one.decode]
    return min(known, key=lambda one: replace(one.shape, num_layers=NUM_LAYERS).num_params, default=None)


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors for the seconds of a device, by kind.

    num_workers: how many ranks of a node compute at full speed at the same time, as measured.
    """

    inference: float
    training: float
    generation: float
    num_workers: float

    @classmethod
    def of(cls, measured: Sequence[Pieces], table_s: Pieces, num_workers: float) -> "Scale":
        """Computes the scaling from the seconds on every rank, and those of the table."""
        kinds = {
            name: sum(getattr(one, name) for one in measured) / len(measured) / seconds
            for name, seconds in asdict(table_s).items()
        }
        return cls(**kinds, num_workers=num_workers)


def scaled(calibration: Calibration, device: str, scale: Scale) -> Calibration:
    """Returns the calibration with the seconds of one type of device scaled."""
    before = calibration.devices[device]
    changed = replace(
        before,
        matrix_flops=before.matrix_flops / scale.inference,
        memory_bytes_per_s=before.memory_bytes_per_s / scale.generation,
        layer_s=before.layer_s * scale.inference,
        decode_layer_s=before.decode_layer_s * scale.generation,
        decode_reduce_s=before.decode_reduce_s * scale.generation,
        num_workers=scale.num_workers,
        measured=tuple(_table(one, scale) for one in before.measured),
    )
    return replace(calibration, devices={**calibration.devices, device: changed})


def _table(one: Measured, scale: Scale) -> Measured:
    return replace(
        one,
        forward=one.forward.times(scale.inference),
        train=one.train.times(scale.training),
        update=one.update.times(scale.training),
        prefill=one.prefill and one.prefill.times(scale.generation),
        decode=one.decode and one.decode.times(scale.generation),
        ends=one.ends and one.ends.times(scale.generation),
    )
