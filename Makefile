# The commands of the project. Each makes the environment it needs first.
#   make demo         train the demo model on real text and show the result
#   make test         the tests
#   make test-full    the large grid of lengths, dtypes and depths, in shards of
#                     less than an hour each; one: make test-full-models
#   make test-core    the tests of the core, for a further Python
#   make lint         ruff and pyright; make -k lint: all three to the end
#   make bench        the benchmark of the memory layer
#   make constraints  refresh the pinned versions of every Python
#   make PYTHON=/path/to/python ...   with that Python instead of the newest

VENV = .venv
PYTHON =
# A worker of the tests is one process with eight simulated devices.
WORKERS = 2
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal
# What a version of jax or flax can break.
CORE = tests/memory tests/recurrences tests/attention tests/layers \
  tests/models tests/training/test_checkpoint.py tests/test_config.py \
  tests/experiments tests/packaging

# The tests marked full, by shard.
SHARDS = memory models depth rest
FULL_memory = tests/memory
FULL_models = tests/models
FULL_depth = tests/training/test_depth.py
FULL_rest = tests $(foreach shard,memory models depth,--ignore=$(FULL_$(shard)))

.PHONY: demo test test-full test-core lint lint-rules lint-format lint-types \
  bench constraints venv clean

demo: venv
	@$(VENV)/bin/python -m experiments.demo

test: venv
	$(PYTEST)

test-full: $(SHARDS:%=test-full-%)

test-full-%: venv
	$(PYTEST) --full -m full $(FULL_$*)

test-core: venv
	$(PYTEST) $(CORE)

lint: lint-rules lint-format lint-types

lint-rules: venv
	$(VENV)/bin/python -m ruff check

lint-format: venv
	$(VENV)/bin/python -m ruff format --check

lint-types: venv
	$(VENV)/bin/python -m pyright --pythonpath $(VENV)/bin/python

bench: venv
	$(VENV)/bin/python -m experiments.benchmark --suite=memory

constraints:
	@sh scripts/refresh_constraints.sh

venv:
	@sh scripts/make_venv.sh "$(VENV)" "$(PYTHON)"

clean:
	rm -rf .venv .venv-* .cache build dist *.egg-info .pytest_cache .ruff_cache
