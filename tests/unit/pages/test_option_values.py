"""What the text of an option means, by the type of the option."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_values import parse_value

Seed = Annotated[int, Field(ge=0, lt=2**64)]
Share = Annotated[float, Field(ge=0, lt=1)]
Weights = tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
Range = tuple[PositiveFloat, PositiveFloat] | None
Stops = tuple[Annotated[str, Field(min_length=1)], ...]
Choice = Literal["all", "matrices", "none"]
Variables = Mapping[str, JsonValue]

ACCEPTED: dict[Any, dict[Any, Any]] = {  # type -> text, or a value of a file: what it means
    PositiveInt: {"3": 3, " 3 ": 3, "+3": 3, "1_000": 1000, "3.0": 3, "1e3": 1000, "007": 7},
    NonNegativeInt: {"0": 0, "-0": 0, "0.0": 0},
    Seed: {"18446744073709551615": 2**64 - 1},
    float: {"-2.5": -2.5, "1e-3": 1e-3, "5": 5.0, ".5": 0.5, "1_0.5": 10.5, " 1 ": 1.0, "1E5": 1e5, "-0": -0.0},
    Share: {"0": 0.0, "0.999": 0.999},
    bool: {"true": True, "False": False, "ON": True, "off": False, "yes": True, "n": False, "1": True, "0": False},
    Choice: {"all": "all", "matrices": "matrices", "none": "none"},
    str: {"": "", "x": "x", "none": "none", "null": "null", "7": "7", " a ": " a ", "a,b": "a,b", "[1]": "[1]"}
    | {"true": "true", "{": "{", ("a", "b"): "a,b", (): "", None: ""},
    Share | None: {"none": None, "None": None, "null": None, "0.5": 0.5, None: None},
    int | None: {"NONE": None, "-4": -4},
    str | None: {"none": "none", "x": "x", None: None},
    int | str: {"x": "x", "3": "3"},
    Weights: {"": (), "1": (1.0,), "1,2.5": (1.0, 2.5), " 1 , 2 ": (1.0, 2.0), "[1, 2]": (1.0, 2.0), "[]": ()}
    | {("1", "0.5"): (1.0, 0.5), None: ()},
    Range: {"0.5,2": (0.5, 2.0), "[0.5, 2]": (0.5, 2.0), "none": None, ("0.5", "2"): (0.5, 2.0)},
    Stops: {"a": ("a",), "a, b": ("a", "b"), '["a, b"]': ("a, b",), "none": ("none",), "7": ("7",), ("a,b",): ("a,b",)}
    | {"": (), None: (), '[""]': ('[""]',)},
    Variables: {'{"a": 1}': {"a": 1}, "{}": {}, "": {}, "none": {}, "None": {}, None: {}}
    | {'{"on": [true, null, "x"]}': {"on": [True, None, "x"]}},
    dict[str, float]: {'{"actor": 1}': {"actor": 1.0}},
    list[float]: {"0.5,0.5": [0.5, 0.5], "[0.5, 0.5]": [0.5, 0.5], "0.5": [0.5]},
    list[str]: {"actor, critic": ["actor", "critic"]},
    Sequence[int]: {"1,2": [1, 2]},
    tuple[int, ...]: {"3": (3,)},
}
REFUSED: dict[Any, dict[Any, str]] = {  # type -> text: what the message says
    PositiveInt: {"three": "valid integer", "1.5": "valid integer", "0": "greater than 0", None: "valid integer"}
    | {"inf": "valid integer", "[" * 9000: "valid integer", ("8",): "valid integer", "true": "valid integer"},
    Seed: {"18446744073709551616": "less than 18446744073709551616"},
    float: {"much": "valid number", "nan": "finite", "1e400": "finite", None: "valid number", "true": "valid number"},
    bool: {"maybe": "valid boolean", "2": "valid boolean", "[true]": "valid boolean"},
    Choice: {"float16": "'all', 'matrices' or 'none'", "ALL": "'all'", None: "'all'"},
    Share | None: {"": "valid number", "1": "less than 1"},
    Weights: {"0": "greater than 0", "1,x": "valid number", "1,inf": "finite", "1,,2": "valid number"},
    Range: {"0.5": "required", "1,2,3": "at most 2"},
    Stops: {"a,,b": "at least 1"},
    Variables: {"a": "dictionary", "[1]": "dictionary"},
}


def given(text: Any) -> Any:
    return list(text) if isinstance(text, tuple) else text


@pytest.mark.parametrize("annotation", ACCEPTED, ids=str)
def test_texts_that_are_accepted(annotation):
    found = {text: parse_value(annotation, given(text), "k") for text in ACCEPTED[annotation]}
    assert found == ACCEPTED[annotation]
    assert [type(value) for value in found.values()] == [type(value) for value in ACCEPTED[annotation].values()]


@pytest.mark.parametrize("annotation", REFUSED, ids=str)
def test_texts_that_are_refused(annotation):
    for text, words in REFUSED[annotation].items():
        with pytest.raises(UserError) as error:
            parse_value(annotation, given(text), "k")
        message = str(error.value)
        assert message.startswith("k") and words in message and len(message) < 600, (text, message)
