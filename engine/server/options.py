"""ServeOptions: every option of a server, typed. The options of the command line and of Ray Serve are derived from it.

`OPTIONS` lists the leaves of `ServeOptions` by the flat names that users write. Types and default values come from the
dataclasses. This module imports nothing slow, because `guided --help` needs it.
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
"""Name that the embedded model is served under."""

_MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP application. `OPTIONS` describes all but two: the names that requests may use for the model
    (answers carry the first), and the values of `SamplingParams` for what a request leaves out."""

    model_names: tuple[str, ...] = (DEFAULT_MODEL,)
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    backend: str = AUTO
    strict_schema: bool = False
    max_requests: int = 1024
    max_waiting: int = 512
    max_body_bytes: int = 4 << 20
    max_body_values: int = 200_000
    max_outputs: int = 256
    max_answer_logprobs: int = 200_000
    stall_seconds: float = 60.0
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    strict_fields: bool = False
    allowed_origins: tuple[str, ...] = ()
    playground: bool = True
    describe_schema: bool = False

    RANGES: ClassVar[Mapping[str, Range]] = {
        **dict.fromkeys(("max_requests", "max_waiting", "max_body_bytes", "max_body_values"), Range(1)),
        **dict.fromkeys(("max_outputs", "max_answer_logprobs"), Range(1)),
        "stall_seconds": Range(0, exclusive=True),
    }

    def __post_init__(self) -> None:
        resolve(self.backend)
        check_ranges(self)
        for name, known in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            if (chosen := getattr(self, name)) not in (AUTO, "none", *known):
                raise InvalidRequest(f"there is no {name} {chosen!r}: choose one of auto, none, {', '.join(known)}")
        if self.api_key and not self.api_keys:
            raise ValueError("api_key holds no key")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys. Empty: no key is needed."""
        return tuple(stripped for key in (self.api_key or "").split(",") if (stripped := key.strip()))


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of `guided serve`. Ray Serve has its own HTTP proxy."""

    max_connections: int = 2048
    max_header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 75.0
    """Clients and proxies keep idle connections for 5 to 60 s. A server that closes first may do so at the moment when
    the client sends a request."""

    RANGES: ClassVar[Mapping[str, Range]] = {
        **dict.fromkeys(("max_connections", "max_header_bytes"), Range(1)),
        **dict.fromkeys(("header_seconds", "body_seconds", "idle_seconds"), Range(0, exclusive=True)),
    }

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ServeOptions:
    """Options of one server process: of `guided serve`, and of a replica of the Ray Serve application."""

    model: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    pool: Literal["ray", "inline"] = "ray"
    post_processor: str | None = None
    grace_seconds: float = 10.0
    forwarded_allow_ips: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    load: LoadOptions = field(default_factory=LoadOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ray: RayPoolOptions = field(default_factory=RayPoolOptions)
    server: ServerSettings = field(default_factory=ServerSettings)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    RANGES: ClassVar[Mapping[str, Range]] = {"port": Range(0, 65535), "grace_seconds": Range(0)}

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> ServeOptions:
        """Build the options from values by the flat names of `OPTIONS`. What is missing keeps its default."""
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


_API_KEY_VARIABLE = "GUIDED_API_KEY"


def take_api_key(options: ServeOptions) -> ServeOptions:
    """Use the API key of the file or of the environment if the options have none, and remove it from the environment.

    Call it before the first child process is started: children inherit the environment.
    """
    key = os.environ.pop(_API_KEY_VARIABLE, None)
    if options.server.api_key_file is not None:
        key = ",".join(Path(options.server.api_key_file).read_text().split())
        if not key:
            raise ValueError(f"there is no key in the file {options.server.api_key_file}")
    if options.server.api_key or not key:
        return options
    return replace(options, server=replace(options.server, api_key=key))


def check_names(options: ServeOptions) -> None:
    """Check the names of model, logits processors and post-processor, before the model and its libraries are loaded.

    Raises:
        OSError: there is no such directory.
        ValueError: a logits processor or the post-processor cannot be loaded.
    """
    model = options.model_path
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():  # no hub name begins like this
        raise OSError(f"there is no model directory {model}")
    from engine.logits_processors.loading import load_classes  # slow: torch
    from engine.post_processors import find_post_processor

    load_classes(options.engine)
    if options.post_processor is not None:
        find_post_processor(options.post_processor)


def _with(base: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of a dataclass with another value at `path`."""
    name, *rest = path
    return replace(base, **{name: _with(getattr(base, name), rest, value) if rest else value})


@dataclass(frozen=True)
class Option:
    """One leaf of `ServeOptions` as users write it: `--flat-name` on the command line, `flat_name` for Ray Serve.

    Args:
        field: the path of the leaf, with dots.
        help: what the command line says about it.
        name: flat name. By default the last part of the path. A name that ends in `_mib` stands for a field in bytes.
        process_only: an option of `guided serve` only. Ray Serve has its own setting.
        env: environment variable that the command line reads.
        panel: heading that the command line lists it under.
        metavar: what one value of an option that can be repeated is called.
    """

    field: str
    help: str
    name: str = ""
    process_only: bool = False
    env: str | None = None
    panel: str | None = None
    metavar: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.path[-1])

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.field.split("."))

    @property
    def type(self) -> Any:
        """The type of the value that users write."""
        if self.field == "engine.logits_processors":
            return tuple[str, ...]  # classes can be given from Python only
        return get_type_hints(self._owner)[self.path[-1]]

    @property
    def range(self) -> Range | None:
        """The values that users may write. None: any."""
        found: Range | None = getattr(self._owner, "RANGES", {}).get(self.path[-1])
        if found is not None and self._is_mib:
            found = replace(found, least=-(-found.least // _MIB))
        return found

    @property
    def _owner(self) -> Any:
        """The dataclass of the field."""
        return reduce(lambda owner, name: get_type_hints(owner)[name], self.path[:-1], ServeOptions)

    @property
    def default(self) -> Any:
        defaults: Any = ServeOptions()
        value = reduce(getattr, self.path, defaults)
        return value if value is None or not self._is_mib else value // _MIB

    def to_field(self, value: Any) -> Any:
        """Convert a value that a user wrote to the field's unit and type."""
        if isinstance(value, list):
            return tuple(value)
        return value if value is None or not self._is_mib else value * _MIB

    @property
    def _is_mib(self) -> bool:
        return self.name.endswith("_mib")


def _panel(title: str, *options: Option) -> Iterator[Option]:
    return (replace(option, panel=title) for option in options)


OPTIONS = (
    Option("model", "A local directory, or a name on the Hugging Face hub. Default: the embedded model."),
    Option("served_model_name", "Name that requests use for the model. Default: MODEL."),
    Option("host", "Address to listen on.", process_only=True),
    Option("port", "Port to listen on. 0 picks a free one.", process_only=True),
    Option(
        "server.api_key",
        "Key that requests must carry; several with commas. The variable keeps it out of process lists.",
        env=_API_KEY_VARIABLE,
        process_only=True,
    ),
    Option("server.api_key_file", "File with the key, or several, one a line."),
    Option(
        "server.allowed_hosts",
        "A name in the header Host that requests may use, or * for any. Can be repeated. "
        "Default: if HOST is a loopback address, the names of this machine's loopback; else any.",
        metavar="NAME",
    ),
    Option(
        "server.allowed_origins",
        "A web page's origin that may use the server from a browser (CORS), or * for any. Can be repeated.",
        metavar="ORIGIN",
    ),
    Option("server.playground", "Serve a page to try the server at /."),
    Option("server.describe_schema", "Put the JSON schema into the prompt of chats that do not say."),
    Option("server.strict_fields", "Reject unknown fields of a request, instead of ignoring them."),
    Option("server.tool_format", f"How the model writes calls: auto, none, {', '.join(TOOL_FORMATS)}."),
    Option("server.reasoning_format", f"How the model writes thoughts: auto, none, {', '.join(REASONING_FORMATS)}."),
    Option(
        "forwarded_allow_ips",
        "Addresses of proxies, with commas, that X-Forwarded-For is believed from. Default: none.",
        process_only=True,
    ),
    Option("server.stall_seconds", "Seconds for which a stream's client may read nothing before it is aborted."),
    Option("grace_seconds", "Seconds that running generations have to end when the server stops."),
    Option("log_level", "How much to log."),
    Option("log_format", "Log records as text, or as one line of JSON each."),
    *_panel(
        "Engine",
        Option("load.device", "auto, cpu, cuda, cuda:1, ..."),
        Option(
            "load.dtype",
            "auto (the checkpoint's; float32 on a CPU without instructions for it), float32, bfloat16, float16.",
        ),
        Option("load.tensor_parallel_size", "Number of processes, one per GPU, that the model is split over."),
        Option("load.tokenizer", "Directory or hub name of the tokenizer. Default: the model's."),
        Option("load.revision", "Branch, tag or commit of the model on the hub."),
        Option("engine.max_num_seqs", "Maximum number of sequences in one step."),
        Option("engine.max_num_batched_tokens", "Maximum number of tokens in a step. Default: 64 on a CPU, else 4096."),
        Option("engine.max_model_len", "Context length in tokens. Default: the model's own."),
        Option("engine.block_size", "Tokens per block of the KV cache."),
        Option("engine.num_blocks", "Blocks of the KV cache. Default: as many as --kv-cache-mib holds."),
        Option("engine.kv_cache_bytes", "MiB for the KV cache. Default: a share of the free memory.", "kv_cache_mib"),
        Option("engine.enable_prefix_caching", "Reuse the KV cache of prompts that begin with the same tokens."),
        Option("engine.cpu_threads", "Threads of the forward pass on a CPU. Default: by the model's size."),
        Option("engine.seed", "Seed of requests that have none."),
        Option(
            "engine.logits_processors",
            "A custom logits processor (docs/logits-processors.md). Can be repeated.",
            metavar="MODULE:CLASS",
        ),
        Option(
            "post_processor", "A post-processor (MODULE:CLASS) that works beside the standard one (docs/embedding.md)."
        ),
        Option("engine.logits_processor_plugins", "Load the logits processors of installed packages' entry points."),
    ),
    *_panel(
        "Mask pool",
        Option("pool", "Where masks are computed: Ray actors, or this process (no isolation)."),
        Option(
            "server.backend",
            "Library of requests that name none: auto, llguidance, xgrammar, outlines, lm-format-enforcer.",
        ),
        Option("server.strict_schema", "Reject formats in schemas that are not in the specification."),
        Option(
            "ray.address",
            "Join this Ray cluster ('auto': a local one). Default: start one.",
            "ray_address",
            process_only=True,
        ),
        Option("ray.num_actors", "Mask actors at the start. Default: by the number of CPUs."),
        Option(
            "ray.placement",
            "Nodes for the mask actors: local, spread (all), a Ray resource (NAME:AMOUNT) or node label (NAME=VALUE).",
        ),
        Option("ray.actor_cpus", "CPUs that Ray reserves per mask actor. Default: 1 on a cluster that is joined."),
        Option("ray.slots", "Maximum number of open sequences per mask actor."),
        Option("engine.forced_tokens", "Append tokens without an alternative without a forward pass for each."),
        Option("engine.num_speculative_tokens", "Draft tokens per sequence and step, by prompt lookup. 0: off."),
        Option("engine.mask_deadline", "Seconds that a step waits for masks. Default: 5 % of a mean step."),
        Option("ray.mask_limit", "Seconds that one mask may take before its request fails."),
        Option(
            "ray.max_replays",
            "0: requests open on a mask actor that dies fail. N: they move, and the suspect is retried N times.",
        ),
        Option("ray.pool_wait", "Seconds that constrained requests wait while no actor is up."),
        Option(
            "ray.actor_memory_bytes",
            "MiB that a mask actor may take. Default: 2048, at most half of the machine.",
            "actor_memory_mib",
        ),
        Option("ray.max_cache_bytes", "MiB for compiled grammars: unused ones take what is left.", "grammar_cache_mib"),
    ),
    *_panel(
        "Limits of the server (429 beyond)",
        Option("server.max_requests", "Generations that run or wait: n for each prompt."),
        Option("server.max_waiting", "Prompts that wait for a grammar or for their turn."),
        Option("ray.max_compiling", "Constraints that are being compiled or wait for it."),
        Option(
            "ray.compile_limits.processes", "Compile processes. Default: by the number of CPUs.", "compile_processes"
        ),
        Option("ray.compile_limits.seconds", "Seconds that compiling a constraint may take.", "compile_seconds"),
        Option(
            "ray.compile_limits.wait_seconds",
            "Seconds that a constraint may wait for a process.",
            "compile_wait_seconds",
        ),
        Option("ray.compile_limits.memory_bytes", "MiB that compiling a constraint may take.", "compile_memory_mib"),
        Option("ray.compile_limits.grammar_bytes", "MiB that one compiled grammar may take.", "compiled_grammar_mib"),
    ),
    *_panel(
        "Connections",
        Option(
            "connections.max_connections",
            "Connections. One more ends the one that has waited longest.",
            process_only=True,
        ),
        Option("connections.max_header_bytes", "Size of URL and headers, in bytes (431 beyond).", process_only=True),
        Option("connections.header_seconds", "Seconds for URL and headers (408 beyond).", process_only=True),
        Option("connections.body_seconds", "Seconds for the body (408 beyond).", process_only=True),
        Option("connections.idle_seconds", "Seconds between an answer and the next request.", process_only=True),
    ),
    *_panel(
        "Limits of one request (400 beyond)",
        Option("server.max_body_bytes", "Size of a request's body, in bytes (413 beyond)."),
        Option("server.max_body_values", "Values in a request's body: objects, arrays, strings, numbers, ..."),
        Option("server.max_outputs", "Outputs of one request: prompts times n."),
        Option("server.max_answer_logprobs", "Log-probabilities that an answer with several choices could have."),
        Option("engine.max_n", "Outputs of one request (n). Default: --max-num-seqs."),
        Option("engine.limits.max_constraint_bytes", "Size of a constraint, in bytes."),
        Option("engine.limits.max_values", "Values in a JSON schema."),
        Option("engine.limits.max_nesting", "Levels of nesting in a schema, of brackets in a regex or grammar."),
        Option("engine.limits.max_alternatives", "Alternatives: anyOf and oneOf of a schema, | of a regex or grammar."),
        Option("engine.limits.max_enum", "Values of an enum."),
        Option("engine.limits.max_choices", "Entries of choice."),
        Option("engine.limits.max_repetition", "Repetition bounds (nested ones multiplied), minLength, minItems, ..."),
        Option("engine.limits.max_grammar_rules", "Rules of a grammar."),
    ),
)
"""All options, in the order in which the command line lists them."""
