# make demo: see plain vLLM vary and the mode not.   make test: every test this machine can run.
VENV ?= .venv
PYTHON ?= python3
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
RUN = $(VENV)/bin/python -m
DEMO_MODEL = .cache/smollm2

.PHONY: demo fleet-demo on-policy test test-all test-engines test-others test-interpreted lint install clean site test-site test-npu test-patch-points test-versions test-triton test-npu-fake-cann test-witnesses test-fleet
install: $(VENV)/installed-$(DEVICE)

$(VENV)/installed-%: pyproject.toml requirements/overrides-cpu.txt scripts/install.sh
	sh scripts/install.sh $(VENV) $* $(PYTHON)
	touch $@

$(DEMO_MODEL)/config.json: vllm_batch_invariant/verify/real_model.py
	@$(RUN) vllm_batch_invariant.cli make-checkpoint --real $(@D)

# make demo SAMPLES=1000 asks as often; without it there are as many answers as take minutes on this machine.
demo:
	@command -v g++ >/dev/null || { echo "make demo: plain vLLM compiles CPU kernels and needs g++; install it (the mode itself needs none)"; exit 2; }
	@echo "1/4 vLLM and this project in $(VENV)"
	@$(MAKE) --no-print-directory install
	@echo "2/4 a small trained model in $(DEMO_MODEL)"
	@$(MAKE) --no-print-directory $(DEMO_MODEL)/config.json
	@$(RUN) scripts.demo $(DEMO_MODEL) $(if $(SAMPLES),--samples $(SAMPLES))

$(VENV)/installed-fleet: $(VENV)/installed-$(DEVICE) requirements/fleet.txt
	$(VENV)/bin/uv pip install -q --python $(VENV)/bin/python --override requirements/overrides-cpu.txt -r requirements/fleet.txt
	touch $@

# Two replicas of Ray Serve LLM on the CPU, of which some are killed, then plain vLLM in their place: a quarter of an hour on
# two cores. SAMPLES=1000 compares as many answers.
fleet-demo: $(VENV)/installed-fleet $(DEMO_MODEL)/config.json
	$(RUN) scripts.fleet.demo $(DEMO_MODEL) $(if $(SAMPLES),--samples $(SAMPLES))

# GRPO by TRL with plain vLLM and with the mode, and controls: a quarter of an hour on two cores.
$(VENV)/installed-on-policy: $(VENV)/installed-$(DEVICE)
	$(VENV)/bin/uv pip install -q --python $(VENV)/bin/python --override requirements/overrides-cpu.txt -e ".[on-policy]"
	touch $@

# Of the linear layers of engine and trainer: fp8_per_block has them in FP8.
QUANTIZATION ?=
on-policy: $(VENV)/installed-on-policy
	$(RUN) examples.grpo.runs $(if $(QUANTIZATION),--quantization $(QUANTIZATION))

# Replicas of a small model behind real Ray Serve, killed, added and made wrong: adds Ray to the environment; a quarter of an
# hour on two cores.
test-fleet: $(VENV)/installed-fleet
	$(RUN) pytest --exhaustive tests/server/test_fleet.py tests/docs/test_deploy.py --durations=25

lint: install
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# Every test that this machine can run, within twenty minutes on two cores: scripts/run_tests.py has the parts.
RUN_TESTS = NPU_PYTHON=$(NPU_PYTHON) $(RUN) scripts.run_tests $(if $(filter cpu,$(DEVICE)),,--alone)
test: install
	$(RUN_TESTS)

# The same with more models and settings.
test-all: install
	$(RUN_TESTS) --exhaustive

test-engines: install
	$(RUN) pytest -m "engine or server" --durations=25

test-others: install
	$(RUN) pytest -m "not engine and not server" --durations=25

# Kernels for NVIDIA GPUs, in Triton's interpreter: it needs a process of its own.
test-interpreted: install
	TRITON_INTERPRET=1 $(RUN) pytest -m interpreted --durations=25

# Kernels for an Ascend NPU, compiled and simulated: needs neither a device nor CANN.
NPU_VENV ?= .venv-npu
NPU_PYTHON ?= python3.11
$(NPU_VENV)/installed: requirements/overrides-npu.txt scripts/install_npu.sh
	sh scripts/install_npu.sh $(NPU_VENV) $(NPU_PYTHON)
	touch $@

test-npu: $(NPU_VENV)/installed
	$(NPU_VENV)/bin/python -m pytest tests/ascend/offline

# Every release of vLLM for GPUs, read: downloads each wheel once, and keeps its sources.
test-patch-points: install
	$(RUN) scripts.check_patch_points --write

# The core of the engine tests with every release of vLLM for CPUs: an environment of 1 GB and some minutes each.
test-versions: install
	$(RUN) scripts.check_versions --write

# Whether bits changed since the last tag: small models are served by both, and CHANGELOG.md has to say what is found.
test-witnesses: install
	$(RUN) scripts.compare_witnesses

# Every variant of the kernels for NVIDIA GPUs, compiled for each GPU and kept in .cache/triton: needs no GPU, and hours the
# first time.
test-triton: install
	$(RUN) scripts.check_triton triton==3.6.0 triton

# The real torch_npu over fakes of CANN: which calls reach a kernel of CANN, with the mode and without.
NPU_FAKE_CANN = .cache/npu-fake-cann
$(NPU_FAKE_CANN)/installed: scripts/install_npu_fake_cann.sh tests/ascend/fake_cann/libraries.py tests/ascend/fake_cann/runtime.c
	sh scripts/install_npu_fake_cann.sh $(NPU_FAKE_CANN) $(PYTHON)
	touch $@

test-npu-fake-cann: $(NPU_FAKE_CANN)/installed
	NPU_FAKE_CANN=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH=$(NPU_FAKE_CANN)/cann PYTHONPATH=. \
		$(NPU_FAKE_CANN)/bin/python -m pytest tests/ascend/fake_cann

# The documents and the pages with things to move, as files that can be opened or served: .cache/site/index.html.
SITE_VENV ?= .venv-site
$(SITE_VENV)/installed: pyproject.toml site/package-lock.json scripts/install_site.sh
	sh scripts/install_site.sh $(SITE_VENV) $(PYTHON)
	touch $@

site: $(SITE_VENV)/installed
	$(SITE_VENV)/bin/python -m scripts.site

# tests/conftest.py is left out, because it imports PyTorch, which these tests do without.
test-site:
	BROWSER=install sh scripts/install_site.sh $(SITE_VENV) $(PYTHON)
	$(SITE_VENV)/bin/python -m pytest --confcutdir=tests/site tests/site

clean:
	rm -rf $(VENV) $(NPU_VENV) $(SITE_VENV) site/node_modules .cache
