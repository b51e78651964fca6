"""The packages that an installation may lack, and the extras of setup.py that bring them."""

# {extra: the modules that need it}
EXTRAS = {
    "pod": (
        "ray",
        "google.cloud",
        "google.api_core",
        "google.auth",
        "fabric",
        "invoke",
        "paramiko",
        "tensorflow",
        "gcsfs",
    ),
    "serve": ("fastapi", "starlette", "uvicorn", "prometheus_client", "llguidance"),
    "replicas": ("grpc_reflection", "mmh3", "watchfiles"),  # of ray.serve
    "plan": ("matplotlib",),
    "records": ("ftfy", "zstandard", "pyarrow"),
    "wandb": ("wandb",),
    "eval": ("lm_eval", "rouge_score"),
    "datasets": ("datasets",),
    "gguf": ("gguf",),
}


def missing(error: ImportError) -> str | None:
    """Return one line that says which extra brings the package whose import failed.

    The result is None if no extra brings it.
    """
    for extra, modules in EXTRAS.items():
        for module in modules:
            if f"{error.name}.".startswith(f"{module}."):
                extras = f"'mesh-transformer[{extra}]'"
                return f"package {module} is missing; install the extra: pip install {extras}"
    return None
