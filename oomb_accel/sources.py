"""Where settings come from: Python, flags and environment, yaml presets, the ``"oomb"`` block of a DeepSpeed config.

Precedence: Python, then flag, then yaml, then JSON. A flag may replace what yaml or JSON say; any other pair of
sources that disagree is an error that names both places. Equal values are no contradiction, however written.
"""

from __future__ import annotations

import base64
import copy
import difflib
import importlib.util
import json
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oomb_accel.config import OombConfig, checked_setting, plain_value, unknown_key_message
from oomb_accel.reading import Unreadable, file_text, json_value, kind_of, shown, yaml_value
from oomb_accel.setting_text import value_of_text

BLOCK = "oomb"
"""Name of the block in a DeepSpeed config and in recipes."""
PRESET_VARIABLE = "OOMB_CONFIG"
"""Environment variable with the path of a yaml preset."""
CACHE_VARIABLE = "OOMB_CACHE"
"""Environment variable with the folder that keeps token ids."""
LAUNCHED_CONFIG = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Environment variable by which ``accelerate launch`` passes the path of a DeepSpeed config, or ``none``."""

_PREFIX = "OOMB_"
_OTHER_VARIABLES = frozenset(
    {PRESET_VARIABLE, CACHE_VARIABLE, "OOMB_DEBUG", "OOMB_PYTHON", "OOMB_TORCH_INDEX", "OOMB_ALLOW_CUDA_TORCH"}
)
_TYPED: dict[str, tuple[str, str]] = {}
"""Of a variable that stands for an option of this command line: its value, and the option."""
_SETTINGS: dict[str, Any] = typing.get_type_hints(OombConfig)

Kind = Literal["python", "flag", "yaml", "json"]
_ORDER: tuple[Kind, ...] = ("json", "yaml", "flag", "python")


@dataclass(frozen=True, slots=True)
class Source:
    """Settings from one place; checked one by one when the object is made, and then held as `OombConfig` holds them.

    Raises:
        ValueError: an unknown setting, or a value of the wrong type.
    """

    place: str
    """What a message calls the place, such as ``ds.json``."""
    kind: Kind
    values: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)
    """A name for the place of one setting, where that is more exact, such as ``OOMB_CHUNK_TOKENS``."""

    def __post_init__(self) -> None:
        where = f"the {BLOCK} block of {self.place}" if self.kind == "json" else self.place
        checked = {}
        for name, value in self.values.items():
            if name not in _SETTINGS:
                raise ValueError(unknown_key_message(str(name), list(_SETTINGS), where))
            try:
                checked[name] = checked_setting(name, value)
            except ValueError as error:
                raise ValueError(f"In {where}: {_with_default(str(error), name, value)}") from None
        object.__setattr__(self, "values", checked)

    def place_of(self, name: str) -> str:
        """The place that a message names for this setting."""
        return self.places.get(name, self.place)

    @staticmethod
    def of_python(settings: OombConfig | Mapping[str, Any] | None, place: str) -> Source:
        """Settings that a program passed; of a config only those that were written down."""
        if isinstance(settings, OombConfig):
            settings = {name: getattr(settings, name) for name in _SETTINGS if name in settings.given}
        if not isinstance(settings, (Mapping, type(None))):
            raise ValueError(
                f"{place} takes an OombConfig or a mapping of settings.\n  Got {settings!r}.\n"
                f"  Write OombConfig(chunk_tokens=8192); a preset file goes into {PRESET_VARIABLE}."
            )
        return Source(place, "python", dict(settings or {}))


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings that hold, and where each came from."""

    config: OombConfig
    origins: Mapping[str, str]
    """Place of each setting that somebody wrote down."""
    notes: tuple[str, ...]
    """Lines for the banner."""
    sources: tuple[Source, ...] = ()

    def block(self) -> ResolvedBlock:
        """What a DeepSpeed config should hold: the settings without ``"auto"``, which Accelerate would refuse."""
        values = {name: plain_value(getattr(self.config, name)) for name in self.origins}
        block = ResolvedBlock({"enabled": self.config.enabled})
        block.update({name: value for name, value in values.items() if value != "auto"})
        block.sources = self.sources
        return block


class ResolvedBlock(dict[str, Any]):
    """An ``"oomb"`` block that was resolved already, and still knows where its values came from."""

    sources: tuple[Source, ...] = ()


def resolve(*sources: Source) -> Resolved:
    """Merge sources.

    Raises:
        ValueError: two places that contradict each other, or values that do not fit together.
    """
    chosen: dict[str, tuple[Source, Any]] = {}
    overrides = []
    for source in sorted(sources, key=lambda source: _ORDER.index(source.kind)):
        for name, value in source.values.items():
            if name in chosen and chosen[name][1] != value:
                earlier, old = chosen[name]
                if source.kind != "flag" or earlier.kind == "flag":
                    raise ValueError(_contradiction(name, (earlier, old), (source, value)))
                overrides.append(
                    f"{name}={plain_value(value)} ({source.place_of(name)}) replaces {plain_value(old)} "
                    f"({earlier.place_of(name)})"
                )
            chosen[name] = (source, value)
    values = {name: value for name, (_, value) in chosen.items()}
    origins = {name: source.place_of(name) for name, (source, _) in chosen.items()}
    everywhere = ", ".join(dict.fromkeys(origins.values())) or "the defaults"
    config = OombConfig.from_dict(values, place=everywhere)
    return Resolved(config, origins, _notes(values, origins, overrides), sources)


def gather(
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *more: Source,
    environ: Mapping[str, str] | None = None,
) -> tuple[Source, ...]:
    """Everything that asks for chunk recurrence; empty when nobody does.

    Args:
        deepspeed_config: a DeepSpeed config: a mapping, the path of a JSON file, or text as DeepSpeed takes it.
        more: other sources.
        environ: environment variables; the process's own when left out.

    Raises:
        ValueError: an unknown or misspelt setting, or a file that cannot be read.
    """
    found = [*from_deepspeed(deepspeed_config), *surroundings(os.environ if environ is None else environ), *more]
    return tuple(source for index, source in enumerate(found) if source not in found[:index])


def surroundings(environ: Mapping[str, str]) -> tuple[Source, ...]:
    """Flags in the environment, and the yaml preset that ``OOMB_CONFIG`` names."""
    path = environ.get(PRESET_VARIABLE)
    return (*from_environment(environ), *([from_yaml(path)] if path else []))


def from_environment(environ: Mapping[str, str]) -> tuple[Source, ...]:
    """``OOMB_CHUNK_TOKENS=512`` and the like: one source, or none.

    Raises:
        ValueError: an ``OOMB_`` variable that is no setting, or text that does not fit it.
    """
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if variable != variable_of(name) or name not in _SETTINGS:
            known = [*map(variable_of, _SETTINGS), *_OTHER_VARIABLES]
            raise ValueError(unknown_key_message(variable, known, "the environment"))
        values[name] = from_text(name, text, _place_of_variable(variable, environ))
    places = {name: _place_of_variable(variable_of(name), environ) for name in values}
    return (Source("the environment", "flag", values, places),) if values else ()


def remember_option(variable: str, text: str, option: str) -> None:
    """From now on messages name the option where the variable has this value: it was typed, and became the variable
    for whoever reads settings in this process."""
    _TYPED[variable] = (text, option)


def _place_of_variable(variable: str, environ: Mapping[str, str]) -> str:
    text, option = _TYPED.get(variable, (None, variable))
    return option if environ[variable] == text else variable


def setting_names() -> list[str]:
    """Names of all settings."""
    return list(_SETTINGS)


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return _PREFIX + name.upper()


def from_text(name: str, text: str, place: str) -> Any:
    """A value as written in the environment or on the command line, in the setting's type.

    Raises:
        ValueError: it fits none of the setting's types; or the setting does not exist.
    """
    if name not in _SETTINGS:
        raise ValueError(unknown_key_message(name, list(_SETTINGS), place))
    try:
        return checked_setting(name, value_of_text(text, _SETTINGS[name]))
    except ValueError as error:
        raise ValueError(f"In {place}: {error}") from None


def from_yaml(path: str | os.PathLike[str]) -> Source:
    """A preset: a yaml file of settings, alone or under the one key ``oomb``.

    Raises:
        ValueError: the file cannot be read, or is no mapping of settings.
    """
    try:
        values = yaml_value(file_text(Path(path)))
    except Unreadable as error:
        raise ValueError(
            f"The preset {str(path)!r} cannot be read.\n  {error}\n"
            "  Give the path of a yaml file with lines like: chunk_tokens: 8192"
        ) from None
    if isinstance(values, dict) and set(values) == {BLOCK}:
        values = values[BLOCK]
    if not isinstance(values, dict):
        raise ValueError(
            f"The preset {str(path)!r} must hold one mapping of settings.\n  Got {kind_of(values)}.\n"
            "  Example line: chunk_tokens: 8192"
        )
    return Source(str(path), "yaml", values)


def from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> tuple[Source, ...]:
    """The ``"oomb"`` block of a DeepSpeed config: one source, or none where there is no block.

    Raises:
        ValueError: a block that is misspelt or no mapping, or a file that cannot be read.
    """
    if config is None:
        return ()
    values = load_deepspeed_config(config)
    place = _place_of(config, values)
    for key in values:
        word = str(key).lower()
        near = difflib.get_close_matches(word, [BLOCK, "oomb_accel"], n=1, cutoff=0.7) or word.startswith(BLOCK)
        if key != BLOCK and isinstance(values[key], Mapping) and BLOCK in values[key]:
            raise ValueError(
                f"The {BLOCK} block stands inside of {str(key)!r} in {place}, where nobody reads it.\n"
                f"  Got {str(key)!r}: {{{BLOCK!r}: ...}}.\n  Move {BLOCK!r} to the top of the config."
            )
        if key != BLOCK and near:
            raise ValueError(unknown_key_message(str(key), [BLOCK], place, nearest=BLOCK))
    if BLOCK not in values:
        return ()
    block = values[BLOCK]
    if isinstance(block, ResolvedBlock):
        return block.sources
    if not isinstance(block, Mapping):
        raise ValueError(
            f"The {BLOCK} block of {place} must be a mapping.\n  Got {shown(block)}.\n"
            f'  Example: "{BLOCK}": {{"chunk_tokens": 8192}}'
        )
    return (Source(place, "json", dict(block)),)


def launched_config() -> str | None:
    """The DeepSpeed config of ``accelerate launch``; None where there is none, which Accelerate also calls ``none``."""
    given = os.environ.get(LAUNCHED_CONFIG)
    return None if given == "none" else given


def load_deepspeed_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """A DeepSpeed config as a new dict, whichever form it comes in.

    Args:
        config: a mapping, the path of a file, JSON text, or JSON text in base 64.

    Raises:
        ValueError: none of these, or a key that stands twice.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    text = str(config)
    if os.path.exists(text):
        try:
            text = file_text(Path(text))
        except Unreadable as error:
            raise ValueError(
                f"The DeepSpeed config {text!r} cannot be read.\n  {error}\n  Give the path of a UTF-8 JSON file."
            ) from None
    elif not text.lstrip().startswith("{"):
        try:
            text = base64.urlsafe_b64decode(text).decode("utf-8")
        except ValueError:
            raise ValueError(
                f"The DeepSpeed config {text!r} does not exist.\n  Looked in {os.getcwd()}.\n"
                "  Give the path of a JSON file, or a dict."
            ) from None
    try:
        values = json_value(text, _no_key_twice)
    except json.JSONDecodeError as error:
        values = _with_comments(text, error, config)
    except Unreadable as error:
        raise ValueError(
            f"The DeepSpeed config {shown(str(config))} cannot be read.\n  {error}\n"
            '  Example: {"zero_optimization": {"stage": 2}, "oomb": {"chunk_tokens": 8192}}'
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"The DeepSpeed config must be one mapping.\n  Got {kind_of(values)}.\n  Write {{...}}.")
    return values


def _with_comments(text: str, error: json.JSONDecodeError, config: object) -> Any:
    """DeepSpeed reads JSON with comments; so do we where its reader is installed."""
    if importlib.util.find_spec("hjson") is not None:
        import hjson

        try:
            return hjson.loads(text, object_pairs_hook=_no_key_twice)
        except (hjson.HjsonDecodeError, RecursionError):
            pass
    raise ValueError(
        f"The DeepSpeed config {str(config)!r} is not valid JSON.\n  {error}\n"
        '  Example: {"zero_optimization": {"stage": 2}, "oomb": {"chunk_tokens": 8192}}'
    ) from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(
                f"The key {key!r} stands twice in the DeepSpeed config.\n  Got {values[key]!r} and {value!r}.\n"
                "  Keep one of them."
            )
        values[key] = value
    return values


def _place_of(config: object, values: Mapping[str, Any]) -> str:
    """The file of a config. Accelerate passes a dict on; if that holds the block of the launch's file, it is that."""
    path = (launched_config() or "") if isinstance(config, Mapping) else str(config)
    if not os.path.exists(path):
        return "the DeepSpeed config"
    if isinstance(config, Mapping) and load_deepspeed_config(path).get(BLOCK) != values.get(BLOCK):
        return "the DeepSpeed config"
    return path


def _contradiction(name: str, earlier: tuple[Source, Any], later: tuple[Source, Any]) -> str:
    (first, old), (second, new) = later, earlier  # the stronger place first
    old, new = plain_value(old), plain_value(new)
    return (
        f"{name} is set in two places, with different values.\n"
        f"  Got {name}={old!r} in {first.place_of(name)}, and {name}={new!r} in {second.place_of(name)}.\n"
        f"  Remove {name} from one of them, or write {name}={old!r} in both."
    )


def _with_default(message: str, name: str, value: object) -> str:
    """The message for a value that is not allowed; for "auto" with what would work in place of all that is allowed."""
    if value != "auto":
        return message
    default = plain_value(OombConfig.__dataclass_fields__[name].default)
    what, got, _ = message.splitlines()
    remedy = f'"auto" is not resolved for {name}: set {json.dumps(default)} (the default), or leave {name} out.'
    return f"{what}\n{got}\n  {remedy}"


def _notes(values: Mapping[str, Any], origins: Mapping[str, str], overrides: list[str]) -> tuple[str, ...]:
    """Banner lines: what was set where, what was replaced, and what is chosen later."""
    given = [
        ", ".join(f"{name}={plain_value(value)}" for name, value in values.items() if origins[name] == place)
        + f" ({place})"
        for place in dict.fromkeys(origins.values())
    ]
    notes = [f"settings   {', '.join(given) or 'the defaults'}"]
    notes += [f"replaced   {line}" for line in overrides]
    automatic = [name for name, value in values.items() if value == "auto"]
    if automatic:
        notes.append(f"auto       {', '.join(automatic)}: chosen when the model and its device are known")
    return tuple(notes)
