# One thread per process and a fixed hash seed make numbers and timings comparable between machines and runs;
# offline mode makes a test that would download a model fail at once.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE := 1
export PYTHONHASHSEED := 0
unexport PYTHONDONTWRITEBYTECODE

# Not $(shell ...): that would ignore a failure of .ci/env.
RUN = py="$$(.ci/env)" && "$$py" -m

.DEFAULT_GOAL := help
.PHONY: help env demo paper paper-table bench test slow acceptance zoo zoo-readme example-ocr lint format wheel constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env:  ## build the environment if need be and print its Python
	@.ci/env

demo:  ## audit the embedded trained model into ./demo-report/
	$(RUN) fxaudit audit examples/featuregate/model.py:trained --data examples/featuregate/evaluation.txt \
	    --calibration examples/featuregate/calibration.txt --limit 64 --batch-size 8 -o demo-report

# pytest comes last, so that its summary is the last line.
test: lint  ## lint, then the fast tests; ARGS="..." goes to pytest
	$(RUN) pytest -n 2 --dist loadfile $(ARGS)

slow:  ## the slow tests; ARGS="..." goes to pytest
	$(OCR) pytest -m slow $(ARGS)

acceptance:  ## every row of the acceptance table: expected and found; goes on where it was stopped; ARGS="ROW..." for some
	status=0; $(RUN) tests.acceptance.table -o build/acceptance.jsonl $(ARGS) || status=1; \
	$(RUN) pytest -m acceptance tests/replay || status=1; \
	$(RUN) tests.zoo.exported || status=1; exit $$status

onnx:  ## 40 models of the zoo as ONNX on onnxruntime, against torch, into docs/onnx.*; goes on where it was stopped
	$(RUN) tests.zoo.exported $(ARGS)

zoo:  ## trace all third-party models of the zoo into docs/zoo.* and README.md; goes on where it was stopped
	$(RUN) tests.zoo.run $(ARGS)

zoo-readme:  ## write docs/zoo.md and the README's section from docs/zoo.json
	$(RUN) tests.zoo.render

# The package of the example is installed beside the environment, not into it: its own dependencies are not needed.
OCR = py="$$(.ci/env)" && packages="$$(dirname "$$(dirname "$$py")")/ocr" && \
	{ [ -d "$$packages/rapidocr" ] || "$$py" -m pip install -q --no-deps --target "$$packages" rapidocr==3.10.0; } && \
	PYTHONPATH="$$packages" "$$py" -m

example-ocr:  ## audit a third-party classifier with trained squeeze-excite gates into ./ocr-report/
	$(OCR) fxaudit audit examples/ocr_direction/model.py:trained \
	    --data examples/ocr_direction/model.py:evaluation --calibration examples/ocr_direction/model.py:calibration \
	    --margin 0.05 -o ocr-report

paper:  ## train and audit the models of examples/paper/RESULTS.md that have no audit yet; hours, and goes on where stopped
	$(RUN) examples.paper.run $(ARGS)

paper-table:  ## write examples/paper/RESULTS.md and .json from the stored audits; seconds
	$(RUN) examples.paper.table

bench:  ## what recording, replaying and matching cost, beside their peers
	export PYTHONPATH=. && "$$(.ci/peers)" benchmarks/replay.py && "$$(.ci/env)" benchmarks/match.py

lint:  ## style, format and types, changing nothing
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy fxaudit

format:  ## apply the formatter and the safe fixes
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

wheel:  ## build the wheel into dist/
	$(RUN) build --wheel --no-isolation

constraints:  ## resolve all dependencies anew into .ci/constraints.txt
	@set -eu; \
	tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$${PYTHON:-python3} -m venv "$$tmp/env"; \
	"$$tmp/env/bin/python" -m pip install '.[vision,data,test,bench]'; \
	"$$tmp/env/bin/python" -c 'import platform as p; print(f"# Exact versions, resolved on {p.system()} {p.machine()} with {p.python_implementation()} {p.python_version()}.\n# Refresh with: make constraints")' > "$$tmp/pins"; \
	"$$tmp/env/bin/python" -m pip freeze --all --exclude pip --exclude fxaudit >> "$$tmp/pins"; \
	cp "$$tmp/pins" .ci/constraints.txt

clean:  ## remove what builds, tests and checks leave behind
	rm -rf build dist demo-report ocr-report *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
