#!/usr/bin/env bash
# `jax.random.fold_in(key, i)` is `jax.random.split(key, n)[i]`, whatever `n` is.
#
# Expected: two ways to derive keys from one key give different keys, or the documentation says that
# the two must not be mixed.
# Seen: the same keys, and so the same random numbers, for each `i` below `n`, with the default
# generator. Code that splits a key for two uses, and folds in 0 and 1 for two others, draws each
# number twice. JAX 0.7.2, 0.10.2 and 0.12.0.1 do so.
# Guessed before: streams of the two functions are independent.
# Source: JAX 0.10.2 itself; https://docs.jax.dev/en/latest/jax.random.html
#
# Exits with 0 as long as this is so.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax

key = jax.random.key(0)
for num in (2, 5):
    for i, split in enumerate(jax.random.split(key, num)):
        folded = jax.random.fold_in(key, i)
        assert (jax.random.key_data(folded) == jax.random.key_data(split)).all()
        assert jax.random.normal(folded) == jax.random.normal(split)
print("jax", jax.__version__, "fold_in(key, i) is split(key, n)[i]")
PROGRAM
