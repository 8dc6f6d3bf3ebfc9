# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries, with names here of the same meaning.

A name is in one of two tables. ``NAMES`` has those that are translated, each with its arguments:
those that carry over, under which name, and those written out because the default differs here.
``LEFT`` has those without a counterpart of the same meaning, with the reason and what to write. A
name in neither is left too.

Targets begin with ``sx``, ``jax`` or ``functools``, which is how the translated file imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ANY = "any value"


@dataclass(frozen=True)
class Name:
    """A translated name."""

    target: str
    # Arguments that carry over, in their order there; None for all, as they are.
    arguments: tuple[str, ...] | None = None
    # How many of the arguments may stay positional; the others get their keyword.
    positional: int = 99
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Arguments without a counterpart, with the code for which leaving them out changes nothing.
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Arguments whose default differs, with that of the original.
    written: Mapping[str, str] = field(default_factory=dict)
    # Whether it may also be used without a call: as a value, base class or annotation.
    bare: bool = True
    # What a person must look at, for each use.
    check: str = ""


@dataclass(frozen=True)
class Left:
    """An untranslated name."""

    reason: str
    write: str


_GRAPH = {"graph": ("True", "None"), "graph_updates": ("True", "None")}
_EAGER = "placement is separate: parameters get theirs from sx.shard(model, mesh, rules)"
_SNAPSHOT = (
    "a State here holds arrays, not the model's Variables: later changes of the model are not seen "
    "in it, leaves have no .value, and isinstance(leaf, Variable) is False"
)
_MERGED = (
    "the merged model has Variables of its own: what it changes is not seen in the State it was "
    "made of; take sx.state(model) afterwards"
)
_LAYOUT_INIT = (
    "a kernel_init of one's own sees the whole shape here, but a matrix in Flax, so that its "
    "fan-in and fan-out may differ"
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _same(
    names: str, prefix: str = "sx", dropped: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, Name]:
    return {name: Name(f"{prefix}.{name}", dropped=dropped or {}) for name in _words(names)}


# --- modules, variables, states -------------------------------------------------------------------

_VARIABLE = Name(
    "sx.Variable",
    renamed={"sharding": "axes", "sharding_names": "axes", "out_sharding": "axes"},
    dropped={"eager_sharding": (ANY,), "hijax": ("False", "None"), "ref": ("False", "None")},
)
VARIABLES = _words("Variable Param BatchStat Cache Intermediate Perturbation RngState OptState")
# Methods of a class of Variables that Flax calls.
HOOKS = frozenset(
    _words(
        "get_value set_value create_value on_get_value on_set_value on_create_value add_axis "
        "remove_axis on_add_axis on_remove_axis"
    )
)
AXES_NOTE = f"axes= names every dimension (None for one without a name); {_EAGER}"

_OBJECTS = {
    **_same("Module Rngs State GraphDef Carry All Any Not PathContains StateAxes StateSharding"),
    "Rngs": Name("sx.Rngs"),
    **{
        name: Name(f"sx.{name}", renamed=_VARIABLE.renamed, dropped=_VARIABLE.dropped)
        for name in VARIABLES
    },
    "Perturbation": Name(
        "sx.Perturbation",
        renamed=_VARIABLE.renamed,
        dropped=_VARIABLE.dropped,
        check="it is no Intermediate here, so filters for Intermediate leave it out",
    ),
    "List": Name("sx.List"),
    "Dict": Name("sx.Dict", check="entries are d[name] here, not d.name"),
    "DiffState": Name("sx.DiffState"),
    **{
        name: Name("sx.Module", check="a Module here, so train() and iter_modules reach it too")
        for name in ("Object", "Pytree")
    },
    "PARTITION_NAME": Name("sx.partition.PARTITION_NAME"),
    "split": Name("sx.split", dropped=_GRAPH, check=_SNAPSHOT),
    "state": Name("sx.state", dropped=_GRAPH, check=_SNAPSHOT),
    "variables": Name("sx.state", dropped=_GRAPH, check=_SNAPSHOT),
    "merge": Name("sx.merge", dropped={"copy": (ANY,), **_GRAPH}, check=_MERGED),
    "graphdef": Name("sx.graphdef", dropped=_GRAPH),
    "update": Name("sx.update"),
    "pop": Name("sx.pop"),
    "clone": Name("sx.clone", dropped={"variables": ("True",), "arrays": (ANY,), **_GRAPH}),
    "iter_modules": Name(
        "sx.iter_modules",
        dropped=_GRAPH,
        check="a Module comes before what is in it here, and streams are Modules too",
    ),
    "find_duplicates": Name("sx.find_duplicates"),
    "display": Name("sx.view.show"),
    "map": Name("sx.map", dropped={"recreate_variables": ("True",), "graph": _GRAPH["graph"]}),
    "prefix": Name("sx.prefix", dropped=_GRAPH),
    "capture": Name("sx.capture", check=f"{_SNAPSHOT}; outputs of methods are NAME_output"),
    "tabulate": Name(
        "sx.tabulate",
        dropped={
            **dict.fromkeys(_words("table_kwargs column_kwargs console_kwargs"), (ANY,)),
            **dict.fromkeys(_words("row_filter compute_flops compute_vjp_flops"), (ANY,)),
        },
        check="another table, with FLOPs; str(table) is its text",
    ),
    **{
        name: Name(
            "sx.with_vars",
            _words("node ref mutable only"),
            positional=1,
            renamed={"node": "tree"},
            dropped={"hijax": ("False", "None"), "allow_duplicates": (ANY,)},
            check="immutable Variables are FrozenVariable here, matched by sx.Frozen(sx.Param)",
        )
        for name in ("with_vars", "vars_as")
    },
    "with_rngs": Name(
        "sx.with_rngs",
        _words("node split fork broadcast only"),
        positional=1,
        renamed={"node": "tree"},
        dropped=_GRAPH,
    ),
    # Checked by the translator: as a context manager only.
    "fork_rngs": Name(
        "sx.fork_rngs",
        _words("node split"),
        positional=1,
        renamed={"node": "tree"},
        dropped=_GRAPH,
        bare=False,
    ),
    **dict.fromkeys(("A", "M"), Name("typing.Any")),  # type variables, in annotations
    "with_partitioning": Name(
        "sx.partition.with_partitioning",
        _words("initializer sharding mesh"),
        renamed={"initializer": "init_fn", "sharding": "names"},
        check=_EAGER,
    ),
}

# --- transforms -----------------------------------------------------------------------------------

_JIT = "in_shardings out_shardings static_argnums static_argnames donate_argnums donate_argnames"
_GRAD = _words("f argnums has_aux holomorphic allow_int")
_METADATA = {"transform_metadata": "metadata", "f": "function"}
_FUNCTION = {"f": "function"}

_TRANSFORMS = {
    "jit": Name(
        "sx.jit",
        _words(f"fun {_JIT} keep_unused inline"),
        renamed={"fun": "function"},
        dropped={**_GRAPH, "device": ("None",), "backend": ("None",)},
    ),
    "grad": Name("sx.grad", _GRAD, renamed=_FUNCTION, dropped={**_GRAPH, "reduce_axes": ("()",)}),
    "value_and_grad": Name(
        "sx.value_and_grad", _GRAD, renamed=_FUNCTION, dropped={**_GRAPH, "reduce_axes": ("()",)}
    ),
    "vmap": Name(
        "sx.vmap",
        _words("f in_axes out_axes axis_name axis_size spmd_axis_name transform_metadata"),
        renamed=_METADATA,
        dropped=_GRAPH,
    ),
    "scan": Name(
        "sx.scan",
        _words("f length reverse unroll in_axes out_axes transform_metadata"),
        renamed=_METADATA,
        dropped={**_GRAPH, "_split_transpose": ("False",)},
    ),
    "remat": Name(
        "sx.remat", _words("f prevent_cse static_argnums policy"), renamed=_FUNCTION, dropped=_GRAPH
    ),
    "shard_map": Name(
        "sx.shard_map",
        _words("f mesh in_specs out_specs axis_names check_vma"),
        renamed=_FUNCTION,
        dropped=_GRAPH,
    ),
    **_same("cond switch while_loop fori_loop eval_shape", dropped=_GRAPH),
    "checkify": Name(
        "sx.checkify", _words("f errors"), positional=1, renamed=_FUNCTION, dropped=_GRAPH
    ),
    "make_jaxpr": Name(
        "sx.make_jaxpr", _words("f static_argnums"), renamed=_FUNCTION, dropped=_GRAPH
    ),
    # Traversals are cheap here, so nothing is kept between calls.
    "cached_partial": Name("functools.partial", dropped=_GRAPH),
}

# --- layers ---------------------------------------------------------------------------------------

_DTYPES = "dtype param_dtype"
_NONE: tuple[str, ...] = ("None",)
_PROMOTE = {"promote_dtype": (), "kernel_metadata": ("{}",), "bias_metadata": ("{}",)}
_LINEAR = f"use_bias {_DTYPES} precision kernel_init bias_init preferred_element_type rngs"
_NORM = f"epsilon {_DTYPES} use_bias use_scale bias_init scale_init rngs"
_FEATURES = {"num_features": "features"}
_LAST_AXIS = ("-1",)
# Variances are of centred values here, which is at least as accurate.
_BATCH_DROPPED = {"use_fast_variance": (ANY,), "axis_index_groups": _NONE}
_GROUP_DROPPED = {**_BATCH_DROPPED, "axis_name": _NONE}
_NORM_DROPPED = {**_GROUP_DROPPED, "reduction_axes": _LAST_AXIS, "feature_axes": _LAST_AXIS}
_CONV = {"feature_group_count": "groups", "kernel_dilation": "dilation"}
_POOL = {"inputs": "x", "window_shape": "window"}
_CELL = {"hidden_features": "features", "recurrent_kernel_init": "recurrent_init"}
_CELL_ARGUMENTS = f"in_features hidden_features kernel_init bias_init {_DTYPES} rngs"
_CELL_DROPPED = {"keep_rngs": ("False",), "carry_init": _NONE}
_RNN_CALLS = "calls take carry= for initial_carry= and mask= for seq_lengths="
_MASKS = "masks are booleans here, floats there; arithmetic with them may differ"
_CELL_NAMES = "parameters are named input.kernel, input.bias and recurrent.kernel; "

_LAYERS = {
    "Linear": Name("sx.nn.Linear", _words(f"in_features out_features {_LINEAR}")),
    # Checked by the translator: over the last dimensions only.
    "LinearGeneral": Name(
        "sx.nn.Linear",
        _words(f"in_features out_features {_LINEAR}"),
        dropped={"axis": (ANY,), "batch_axis": ("{}",)},
        bare=False,
    ),
    "Einsum": Name(
        "sx.nn.Einsum",
        _words(
            f"einsum_str kernel_shape bias_shape {_DTYPES} precision kernel_init bias_init "
            "preferred_element_type rngs"
        ),
        renamed={"einsum_str": "equation", "kernel_shape": "shape"},
        # That of Flax takes the last two dimensions for a matrix, whatever the equation.
        written={"kernel_init": "jax.nn.initializers.lecun_normal()"},
        bare=False,
    ),
    "Embed": Name(
        "sx.nn.Embed",
        _words(f"num_embeddings features {_DTYPES} embedding_init rngs"),
        dropped={"embedding_metadata": ("{}",)},
        check="a negative index gives NaN, and so does one out of range of a table of one row",
    ),
    "Dropout": Name(
        "sx.nn.Dropout",
        _words("rate broadcast_dims deterministic rngs"),
        dropped={"rng_collection": ("'dropout'", '"dropout"')},
    ),
    "BatchNorm": Name(
        "sx.nn.BatchNorm",
        _words(f"num_features use_running_average axis momentum axis_name {_NORM}"),
        renamed=_FEATURES,
        dropped=_BATCH_DROPPED,
    ),
    "LayerNorm": Name(
        "sx.nn.LayerNorm", _words(f"num_features {_NORM}"), renamed=_FEATURES, dropped=_NORM_DROPPED
    ),
    "RMSNorm": Name(
        "sx.nn.RMSNorm",
        _words(f"num_features epsilon {_DTYPES} use_scale scale_init rngs"),
        renamed=_FEATURES,
        dropped=_NORM_DROPPED,
    ),
    "GroupNorm": Name(
        "sx.nn.GroupNorm",
        _words(f"num_features num_groups group_size {_NORM}"),
        renamed=_FEATURES,
        dropped={**_GROUP_DROPPED, "reduction_axes": _NONE, "group_size": _NONE},
    ),
    "InstanceNorm": Name(
        "sx.nn.InstanceNorm",
        _words(f"num_features {_NORM}"),
        renamed=_FEATURES,
        dropped={**_GROUP_DROPPED, "feature_axes": _LAST_AXIS},
    ),
    "Conv": Name(
        "sx.nn.Conv",
        _words(
            "in_features out_features kernel_size strides padding input_dilation kernel_dilation "
            f"feature_group_count mask {_LINEAR}"
        ),
        positional=3,
        renamed=_CONV,
    ),
    "ConvTranspose": Name(
        "sx.nn.ConvTranspose",
        _words(
            f"in_features out_features kernel_size strides padding kernel_dilation mask {_LINEAR}"
        ),
        positional=3,
        renamed=_CONV,
        dropped={"transpose_kernel": ("False",)},
    ),
    # Features come first here, so everything gets its keyword.
    "MultiHeadAttention": Name(
        "sx.nn.MultiHeadAttention",
        _words(
            "num_heads in_features qkv_features out_features num_kv_heads in_kv_features "
            f"head_dim {_DTYPES} dropout_rate precision kernel_init bias_init use_bias rngs"
        ),
        positional=0,
        renamed={"in_features": "features", "dropout_rate": "dropout"},
        dropped={
            "decode": ("False", "None"),
            "normalize_qk": ("False",),
            "qkv_features": _NONE,
            "in_kv_features": _NONE,
            "keep_rngs": (ANY,),
            "deterministic": ("False", "None"),
        },
        written={"use_bias": "True"},
        bare=False,
        check="parameters are named q, k, v and out; calls take (x, context, mask=booleans), "
        "without decode=, deterministic= and rngs=; dropout masks are drawn for each head and row",
    ),
    "dot_product_attention": Name(
        "sx.nn.dot_product_attention",
        _words("query key value bias mask is_causal precision"),
        positional=3,
        renamed={"is_causal": "causal"},
        dropped={
            "dropout_rate": ("0.0", "0", "0."),
            "deterministic": (ANY,),
            "broadcast_dropout": (ANY,),
            **dict.fromkeys(_words("dropout_rng dtype module"), _NONE),
        },
        bare=False,
        check=_MASKS,
    ),
    "combine_masks": Name("sx.nn.combine_masks", dropped={"dtype": (ANY,)}, check=_MASKS),
    "make_causal_mask": Name(
        "sx.nn.make_causal_mask",
        ("x",),
        dropped={"extra_batch_dims": ("0",), "dtype": (ANY,)},
        check=_MASKS,
    ),
    "make_attention_mask": Name(
        "sx.nn.make_attention_mask",
        _words("query_input key_input pairwise_fn"),
        renamed={"query_input": "query", "key_input": "key", "pairwise_fn": "pairwise"},
        dropped={"extra_batch_dims": ("0",), "dtype": (ANY,)},
        check=_MASKS,
    ),
    "PReLU": Name(
        "sx.nn.PReLU",
        _words("negative_slope_init dtype param_dtype"),
        dropped={"negative_slope_metadata": ("{}",)},
        check="inputs are promoted with the slope here, which is cast to them there",
    ),
    "Sequential": Name(
        "sx.nn.Sequential", check="a tuple that a layer returns is given on as it is"
    ),
    "LSTMCell": Name(
        "sx.nn.LSTMCell",
        _words(_CELL_ARGUMENTS),
        renamed=_CELL,
        dropped=_CELL_DROPPED,
        check=f"{_CELL_NAMES}the carry is (hidden, cell), not (cell, hidden)",
    ),
    "SimpleCell": Name(
        "sx.nn.SimpleCell",
        _words(_CELL_ARGUMENTS),
        renamed=_CELL,
        dropped={**_CELL_DROPPED, "residual": ("False",)},
        written={"dtype": "jax.numpy.float32"},
        bare=False,
        check=_CELL_NAMES.rstrip("; "),
    ),
    "Bidirectional": Name(
        "sx.nn.Bidirectional",
        _words("forward_rnn backward_rnn merge_fn"),
        positional=2,
        renamed={"forward_rnn": "forward", "backward_rnn": "backward", "merge_fn": "merge"},
        dropped={"time_major": ("False",), "return_carry": ("False",), "rngs": (ANY,)},
        check=_RNN_CALLS,
    ),
    "RNN": Name(
        "sx.nn.RNN",
        _words("cell unroll"),
        dropped={
            "time_major": ("False",),
            "return_carry": ("False",),
            "reverse": ("False",),
            "keep_order": (ANY,),
            "state_axes": _NONE,
            "broadcast_rngs": _NONE,
            "rngs": (ANY,),
        },
        check=_RNN_CALLS,
    ),
    # Steps of one are the default there, of a whole window here.
    "max_pool": Name(
        "sx.nn.max_pool",
        _words("inputs window_shape strides padding"),
        positional=2,
        renamed=_POOL,
        written={"strides": "1"},
        bare=False,
    ),
    "avg_pool": Name(
        "sx.nn.avg_pool",
        _words("inputs window_shape strides padding count_include_pad"),
        positional=2,
        renamed=_POOL,
        written={"strides": "1"},
        bare=False,
    ),
}
_LAYERS_WITH_OPTIONS = {
    key: Name(
        name.target,
        name.arguments,
        # All behind these are keywords there too.
        name.positional,
        name.renamed,
        {**_PROMOTE, **name.dropped},
        name.written,
        name.bare,
        name.check,
    )
    for key, name in _LAYERS.items()
}

INIT_NOTE = {"LinearGeneral": _LAYOUT_INIT, "MultiHeadAttention": _LAYOUT_INIT}

# Layers whose metadata may name axes, which an argument here does.
AXES_OF = {
    **dict.fromkeys(
        ("Linear", "Einsum", "Conv", "ConvTranspose"), ("kernel_metadata", "kernel_axes")
    ),
    "Embed": ("embedding_metadata", "axes"),
}

# --- functions of JAX, training -------------------------------------------------------------------

_FUNCTIONS = {
    **_same(
        "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu "
        "log_sigmoid log_softmax logsumexp one_hot relu relu6 selu sigmoid silu soft_sign softmax "
        "softplus standardize swish",
        "jax.nn",
    ),
    "tanh": Name("jax.numpy.tanh"),
    **{
        f"initializers.{name}": Name(f"jax.nn.initializers.{name}")
        for name in _words(
            "constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform "
            "kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal "
            "truncated_normal uniform variance_scaling xavier_normal xavier_uniform zeros "
            "Initializer"
        )
    },
    "initializers": Name("jax.nn.initializers"),
    "Initializer": Name("jax.nn.initializers.Initializer"),
}

_METRIC = "update() takes weights= for mask=, and refuses a keyword that no metric takes"
_UPDATES = "it updates the model that it was made with; update() takes the gradients alone"
_TRAINING = {
    "Optimizer": Name("sx.train.Optimizer", _words("model tx wrt"), dropped=_GRAPH, check=_UPDATES),
    "ModelAndOptimizer": Name("sx.train.Optimizer", _words("model tx wrt")),
    **{
        f"{prefix}{name}": Name(f"sx.train.metrics.{name}", check=note)
        for prefix in ("", "metrics.", "training.metrics.")
        for name, note in (("Metric", ""), ("MultiMetric", _METRIC))
    },
    **{
        f"{prefix}{name}": Name(f"sx.train.metrics.{name}", arguments, check=note)
        for prefix in ("metrics.", "training.metrics.")
        for name, arguments, note in (
            ("Average", ("argname",), ""),
            ("Accuracy", ("threshold",), ""),
            ("Welford", ("argname",), "compute() returns a dict with mean and std"),
        )
    },
}

NAMES: dict[str, Name] = {
    **_OBJECTS,
    **_TRANSFORMS,
    **_LAYERS_WITH_OPTIONS,
    **_FUNCTIONS,
    **_TRAINING,
}

# Names whose translation has another form than a call: see translate.py.
FORMS = frozenset(
    _words(
        "data static to_pure_dict filter_state merge_state split_state initializers.zeros_init "
        "initializers.ones_init"
    )
)

# --- names that are left --------------------------------------------------------------------------

_NOT_NEEDED = "there is one mode here"
_BY_AXES = "streams are split by their entry in in_axes here"

LEFT: dict[str, Left] = {
    "GRUCell": Left(
        "that of Flax has no bias on the recurrent product, which would be trained here",
        "sx.nn.GRUCell(in_features, features, rngs=rngs), and accept the bias",
    ),
    "OptimizedLSTMCell": Left(
        "its recurrent kernel starts as one orthogonal matrix, here one a gate",
        "sx.nn.LSTMCell(in_features, features, rngs=rngs); the carry is (hidden, cell)",
    ),
    "WeightNorm": Left(
        "a call overwrites the kernel there, and scales are not trained; here scales are Params",
        "sx.nn.WeightNorm(layer), and accept that training differs",
    ),
    "SpectralNorm": Left(
        "a call overwrites the kernel there; here the kernel stays, and training differs",
        "sx.nn.SpectralNorm(layer, rngs=rngs)",
    ),
    **dict.fromkeys(
        ("LoRA", "LoRALinear", "LoRAParam"),
        Left("adapters are put on a model", "sx.surgery.lora(sx.select(model), rank=8)"),
    ),
    **dict.fromkeys(
        ("min_pool", "pool"),
        Left("no such pooling here", "jax.lax.reduce_window, or -max_pool(-x)"),
    ),
    **dict.fromkeys(
        _words(
            "set_graph_mode set_graph_updates use_eager_sharding using_eager_sharding var_defaults"
        ),
        Left(_NOT_NEEDED, "nothing: remove it"),
    ),
    "jit_partial": Left(_NOT_NEEDED, "sx.jit(functools.partial(f, model))"),
    **dict.fromkeys(
        ("split_rngs", "restore_rngs"),
        Left(_BY_AXES, "sx.vmap(f, axis_size=n), with 0 in in_axes for what has the streams"),
    ),
    "reseed": Left("of a model it sets keys of streams", "rngs.reseed(dropout=1), of an Rngs"),
    "RngStream": Left("its arguments differ", "sx.RngStream(key, name)"),
    **dict.fromkeys(("RngKey", "RngCount"), Left("both are RngState here", "sx.RngState")),
    "custom_vjp": Left(
        "the backward function gets the cotangent of the result alone",
        "sx.custom_vjp(f), f.defvjp(fwd, bwd) with bwd(residuals, cotangent)",
    ),
    **dict.fromkeys(
        ("vjp", "jvp"),
        Left(
            "tangents and cotangents of Modules are States here, or Modules on request",
            "sx.vjp(f, *primals, as_module=True), sx.jvp",
        ),
    ),
    "pmap": Left("JAX replaces it", "sx.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs)"),
    **dict.fromkeys(
        ("get_partition_spec", "get_named_sharding"),
        Left(
            "specs are those of a model and its rules, not of a State",
            "sx.shard(model, mesh, rules), or sx.partition_specs(model, rules)",
        ),
    ),
    "get_abstract_model": Left("it takes the model", "sx.abstract(model, mesh, rules)"),
    **dict.fromkeys(
        ("logical_axis_rules",),
        Left("earlier rules have priority here, later ones there", "sx.axis_rules(rules)"),
    ),
    **dict.fromkeys(
        ("iter_graph", "iter_children", "iter_module_children"),
        Left(
            "they yield other things",
            "sx.iter_graph(model), sx.iter_variables(model), sx.iter_modules(model)",
        ),
    ),
    "recursive_map": Left(
        "f is called with Modules, Variables and arrays alone here", "sx.recursive_map(f, model)"
    ),
    **dict.fromkeys(
        ("to_flat_state", "from_flat_state", "FlatState"),
        Left("a flat State is a dict by path here", "state.flat(), sx.State.from_flat(flat)"),
    ),
    "replace_by_pure_dict": Left("a State is immutable", "sx.update(model, values)"),
    "map_state": Left("a State is a pytree of arrays", "jax.tree.map(jax.numpy.negative, state)"),
    "module.first_from": Left("a helper of Flax's own layers", "x if x is not None else default"),
    "view": Left("Modules are shared", "sx.bind(*sx.unbind(model)), then set_attributes"),
    "TrainState": Left("an Optimizer holds its model", "sx.train.Optimizer(model, tx)"),
    "EMA": Left("it takes the model", "sx.train.EMA(model, decay)"),
    "set_metadata": Left("a method here", "for _, v in sx.iter_variables(model): v.set_metadata()"),
    "with_metadata": Left("hooks are not offered", "a property of the Module"),
    "OfType": Left("a type is a filter", "the type itself"),
    "WithTag": Left("a text is a filter", "the text itself"),
    "Everything": Left("a filter by itself", "..."),
    "transform_metadata": Left("an option here", "metadata= of sx.vmap and sx.scan"),
    "bridge": Left("Linen modules stay Flax", "sx.bridge, see the page Modules of Flax"),
}

# --- other libraries ------------------------------------------------------------------------------

# Translated where a file uses nothing else of Linen, so that Linen Modules keep Flax's own boxes.
LINEN: dict[str, Name] = _same(
    "with_partitioning with_logical_partitioning with_logical_constraint logical_to_mesh_axes "
    "logical_to_mesh logical_to_mesh_sharding LogicallyPartitioned Partitioned "
    "get_partition_spec get_sharding logical_axis_rules unbox PARTITION_NAME",
    "sx.partition",
)

# Likewise: with nothing else of Equinox, arguments are plain trees, or Modules of shardax.
EQUINOX: dict[str, Name] = {
    "filter_jit": Name(
        "sx.jit", ("fun",), renamed={"fun": "function"}, written={"static": '"auto"'}
    )
}
