"""ServeOptions: the typed configuration of a server.

`OPTIONS` lists the leaves of `ServeOptions` that operators set, by the flat names that
they write on the command line, in a file (`--config`), and as arguments of the Ray
Serve application. Types and default values come from the dataclasses, which `LLM` uses
too. This module imports nothing slow, because `guided --help` needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

from engine.config import EngineConfig, LoadOptions
from engine.default_model import checkpoint_path
from engine.server.logs import LogFormat
from guided.backends import AUTO, resolve
from guided.errors import InvalidRequest
from guided.limits import Range, check_ranges
from guided.pools.options import RayPoolOptions
from guided.tools.formats import REASONING_FORMATS, TOOL_FORMATS

DEFAULT_MODEL = "guided-default"
"""The name under which the embedded model is served."""

_MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP application. `OPTIONS` describes all but three: the name of
    the model, the `SamplingParams` that a request leaves out, and the seconds within
    which a body must arrive."""

    model_name: str = DEFAULT_MODEL
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    backend: str = AUTO
    max_requests: int = 1024
    max_body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    tool_strict: Literal["on", "off"] = "on"
    open_objects: bool = False
    strict_fields: bool = False
    allowed_origins: tuple[str, ...] = ()

    RANGES: ClassVar = dict.fromkeys(("max_requests", "max_body_bytes"), Range(1))

    def __post_init__(self) -> None:
        resolve(self.backend)
        check_ranges(self)
        for name, known in (
            ("tool_format", TOOL_FORMATS),
            ("reasoning_format", REASONING_FORMATS),
        ):
            if (chosen := getattr(self, name)) not in (AUTO, "none", *known):
                raise InvalidRequest(
                    f"there is no {name} {chosen!r}: choose one of auto, none, {', '.join(known)}"
                )
        if self.api_key and not self.api_keys:
            raise ValueError("api_key holds no key")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The API keys. Empty: requests need no key."""
        keys = map(str.strip, (self.api_key or "").split(","))
        return tuple(filter(None, keys))


@dataclass(frozen=True)
class ServeOptions:
    """Options of one server process: of `guided serve`, and of a replica of the Ray
    Serve application."""

    model: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    pool: Literal["ray", "inline"] | None = None
    post_processor: str | None = None
    grace_seconds: float = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    load: LoadOptions = field(default_factory=LoadOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ray: RayPoolOptions = field(default_factory=RayPoolOptions)
    server: ServerSettings = field(default_factory=ServerSettings)

    RANGES: ClassVar = {"port": Range(0, 65535), "grace_seconds": Range(0)}

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> ServeOptions:
        """Build the options from values by the flat names of `OPTIONS`. Missing options
        keep their defaults."""
        options = {option.name: option for option in OPTIONS}
        changed = cls()
        for name, value in values.items():
            changed = _with(changed, options[name].path, options[name].to_field(value))
        return changed

    @property
    def model_path(self) -> str:
        """The local directory or hub name of the model that is loaded."""
        return self.model or str(checkpoint_path())

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self.served_model_name or self.model or DEFAULT_MODEL


def take_api_key(options: ServeOptions) -> ServeOptions:
    """Take the API key from the file or the environment if the options have none.
    Remove it from the environment.

    Call it before the first child process is started: children inherit the environment.
    """
    key = os.environ.pop("GUIDED_API_KEY", None)
    if options.server.api_key_file is not None:
        key = ",".join(Path(options.server.api_key_file).read_text().split())
        if not key:
            raise ValueError(
                f"there is no key in the file {options.server.api_key_file}"
            )
    if options.server.api_key or not key:
        return options
    return replace(options, server=replace(options.server, api_key=key))


def check_names(options: ServeOptions) -> None:
    """Raise ValueError if a logits processor or the post-processor cannot be loaded,
    before the model is loaded."""
    # slow: torch
    from engine.logits_processors.loading import import_named, load_classes

    load_classes(options.engine)
    if options.post_processor is not None:
        import_named("post-processor", options.post_processor)


def _with(base: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of a dataclass with another value at `path`."""
    name, *rest = path
    if rest:
        value = _with(getattr(base, name), rest, value)
    return replace(base, **{name: value})


@dataclass(frozen=True)
class Option:
    """A leaf of `ServeOptions` as users write it: `--flat-name` on the command line,
    `flat_name` for Ray Serve."""

    field: str
    """The path of the leaf in `ServeOptions`, with dots."""
    help: str
    name: str = ""
    """Flat name, by default the last part of the path. A name that ends in `_mib`
    stands for a field in bytes."""
    process_only: bool = False
    """Whether only `guided serve` has the option. Ray Serve has its own setting."""
    panel: str | None = None
    """Heading under which the command line lists the option."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.path[-1])

    @property
    def path(self) -> Sequence[str]:
        return self.field.split(".")

    @property
    def type(self) -> Any:
        """The type of the value that users write."""
        if self.field == "engine.logits_processors":
            return tuple[str, ...]  # only Python code can pass classes
        *owners, name = self.path
        owner: Any = reduce(
            lambda owner, part: get_type_hints(owner)[part], owners, ServeOptions
        )
        return get_type_hints(owner)[name]

    @property
    def default(self) -> Any:
        defaults: Any = ServeOptions()
        value = reduce(getattr, self.path, defaults)
        if value is not None and self.name.endswith("_mib"):
            return value // _MIB
        return value

    def to_field(self, value: Any) -> Any:
        """Convert a value that a user wrote to the field's unit and type."""
        if isinstance(value, list):
            return tuple(value)
        if value is not None and self.name.endswith("_mib"):
            return value * _MIB
        return value


def _panel(title: str, *options: Option) -> Iterator[Option]:
    return (replace(option, panel=title) for option in options)


OPTIONS = (
    Option(
        "model",
        "A directory, a GGUF file, smollm2, or a name on the Hugging Face hub. Default: the embedded model.",
    ),
    *_panel(
        "Server",
        Option(
            "served_model_name", "Name that requests use for the model. Default: MODEL."
        ),
        Option("host", "Address to listen on.", process_only=True),
        Option("port", "Port to listen on. 0 picks a free one.", process_only=True),
        Option(
            "server.api_key",
            "Keys that requests must carry, separated by commas. Default: $GUIDED_API_KEY.",
            process_only=True,
        ),
        Option("server.api_key_file", "File with the keys, one a line."),
        Option(
            "server.allowed_hosts",
            "A name in the header Host that requests may use, or *. Can be repeated. Default: this machine's loopback "
            "names if HOST is one; else any.",
        ),
        Option(
            "server.allowed_origins",
            "Origin of a web page that may use the server (CORS), or *. Can be repeated.",
        ),
        Option("server.strict_fields", "Reject unknown fields of a request."),
        Option(
            "grace_seconds",
            "Seconds in which running generations may end when the server stops.",
        ),
        Option("log_level", "The least severe level to log."),
        Option("log_format", "Log records as text, or as one line of JSON each."),
    ),
    *_panel(
        "Model",
        Option("load.device", "auto, cpu, cuda, cuda:1, ..."),
        Option("load.dtype", "auto (the checkpoint's), float32, bfloat16, float16."),
        Option(
            "load.tensor_parallel_size", "Number of GPUs that the model is split over."
        ),
        Option(
            "load.tokenizer",
            "Directory or hub name of the tokenizer. Default: the model's.",
        ),
        Option("load.revision", "Branch, tag or commit of the model on the hub."),
        Option(
            "load.chat_template",
            "File with a Jinja template for chats. Default: the tokenizer's.",
        ),
        Option(
            "server.tool_format",
            f"How the model writes calls: auto, none, {', '.join(TOOL_FORMATS)}.",
        ),
        Option(
            "server.reasoning_format",
            f"How the model writes thoughts: auto, none, {', '.join(REASONING_FORMATS)}.",
        ),
        Option(
            "server.tool_strict",
            "off: the arguments of functions with strict: false are any object, as in vLLM.",
        ),
    ),
    *_panel(
        "Engine",
        Option("engine.max_num_seqs", "Sequences in one step."),
        Option(
            "engine.max_num_batched_tokens",
            "Tokens in one step. Default: 64 on a CPU (1024 while nothing decodes), else 4096.",
        ),
        Option(
            "engine.max_model_len",
            "Context length in tokens. Default: the model's own.",
        ),
        Option(
            "engine.kv_cache_bytes",
            "MiB for the KV cache. Default: a share of the free memory.",
            "kv_cache_mib",
        ),
        Option(
            "engine.enable_prefix_caching",
            "Reuse the KV cache of prompts that begin alike.",
        ),
        Option(
            "engine.enforce_eager",
            "Do without CUDA graphs: the start is faster, decoding slower.",
        ),
        Option(
            "engine.logits_processors",
            "A custom logits processor (MODULE:CLASS). Can be repeated.",
        ),
        Option(
            "engine.logits_processor_plugins",
            "Load the logits processors of installed packages.",
        ),
        Option(
            "post_processor", "A post-processor (MODULE:CLASS) beside the standard one."
        ),
    ),
    *_panel(
        "Mask pool",
        Option(
            "pool",
            "Where masks are computed: Ray actors, or this process (no isolation). Default: ray if it is installed.",
        ),
        Option(
            "server.open_objects",
            "Objects may have properties that their schema does not name.",
        ),
        Option(
            "server.backend", "Grammar library of requests that name none, or auto."
        ),
        Option(
            "ray.address",
            "Ray cluster to join. Default: start one.",
            "ray_address",
            process_only=True,
        ),
        Option("ray.num_actors", "Mask actors. Default: by the number of CPUs."),
        Option(
            "ray.placement",
            "Nodes of the actors: local, spread, a resource (NAME:AMOUNT) or label (NAME=VALUE).",
        ),
        Option(
            "ray.actor_cpus",
            "CPUs that Ray reserves per mask actor. Default: 1 on a cluster.",
        ),
        Option(
            "ray.actor_memory_bytes",
            "MiB that a mask actor may take. Default: 2048.",
            "actor_memory_mib",
        ),
        Option(
            "ray.mask_limit", "Seconds that one mask may take before its request fails."
        ),
        Option(
            "ray.max_replays",
            "How often a request moves to another mask actor when its actor dies. 0: it fails.",
        ),
        Option(
            "ray.max_cache_bytes", "MiB for compiled grammars.", "grammar_cache_mib"
        ),
        Option(
            "ray.compile_limits.seconds",
            "Seconds that compiling a constraint may take.",
            "compile_seconds",
        ),
    ),
    *_panel(
        "Limits",
        Option(
            "server.max_requests",
            "Generations that run or wait: n for each prompt (503 beyond).",
        ),
        Option("server.max_body_bytes", "Size of a request's body (413 beyond)."),
    ),
)
"""All options, in the order in which the command line lists them."""
