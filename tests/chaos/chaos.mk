# The crash campaign; tests/chaos/README.md says what it does.
#
# Targets: micro-data   models and pictures of examples/micro
# Targets: micro-video  and its clips
# Targets: chaos        the crash campaign: KILLS=20000 SEED=1 JOBS=1; writes docs/reliability.md
# Targets: chaos-nets   random pipelines of every net, run twice: RUNS=200 SEED=1 ONLY=flux STAND_IN=1 (python3)
# Targets: chaos-hosts  several hosts under fire: KILLS=500 DEATHS=100 CUTS=50 LEADERS=20 SEED=1 (root; tests/hosts/README.md)
# Targets: chaos-bundle the campaign for another machine: relocatable directory build/chaos-bundle

CHAOS_DIR   := $(BUILD)/tests/chaos
CHAOS_OBJ   := $(patsubst %,$(BUILD)/obj/%.o,$(filter-out tests/chaos/make_micro.c tests/chaos/ledger_check.c \
               tests/chaos/shim.c,$(wildcard tests/chaos/*.c)))
CHAOS_PROGS := $(CHAOS_DIR)/chaos $(CHAOS_DIR)/make_micro $(CHAOS_DIR)/ledger_check $(CHAOS_DIR)/libchaos.so
MICRO       := examples/micro/made
SPIECE      := examples/emoji/text_encoder/spiece.model

# Where the bundle keeps its libraries.
CHAOS_RPATH := -Wl,-rpath,'$$ORIGIN/../../lib'
$(CHAOS_DIR)/make_micro $(CHAOS_DIR)/chaos: LDFLAGS += $(CHAOS_RPATH)
$(CHAOS_DIR)/make_micro: $(BUILD)/obj/tests/chaos/make_micro.c.o $(LIB)
	$(LINK)
$(CHAOS_DIR)/chaos: $(CHAOS_OBJ) $(LIB)
	$(LINK)
# No code of ours in it: it knows the ledger from its description alone.
$(CHAOS_DIR)/ledger_check: tests/chaos/ledger_check.c
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) -std=c17 -g -O2 -D_GNU_SOURCE $(CWARN) $(SANFLAGS) -Wl,--disable-new-dtags $(CHAOS_RPATH) -o $@ $< -lxxhash
# Loaded into every process of a run, so without sanitizers.
$(CHAOS_DIR)/libchaos.so: tests/chaos/shim.c tests/chaos/shim.h tests/chaos/calls.def
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) -std=c17 -g -O2 -D_GNU_SOURCE -I. -fPIC -shared $(CWARN) -o $@ $< -ldl

.PHONY: micro-data micro-video chaos chaos-nets chaos-hosts chaos-programs chaos-bundle
$(MICRO)/.made: tests/chaos/make_micro.c $(SPIECE) | $(CHAOS_DIR)/make_micro
	@echo "  DATA  $(MICRO)"
	$(Q)rm -rf $(MICRO) && $(CHAOS_DIR)/make_micro $(SPIECE) $(MICRO) && touch $@
micro-data: $(MICRO)/.made
$(MICRO)/.made-video: $(MICRO)/.made | $(BUILD)/bin/lg-emoji-video $(BUILD)/bin/lg-random-model
	@echo "  DATA  $(MICRO)/clips"
	$(Q)rm -rf $(MICRO)/clips $(MICRO)/ltx
	$(Q)$(BUILD)/bin/lg-emoji-video --size 16 --frames 9 --fps 8 --only "red heart" --only dog --only pizza $(MICRO)/clips
	$(Q)$(BUILD)/bin/lg-random-model pipeline --preset tiny-ltx --dtype f32 --seed 3 --spiece $(SPIECE) $(MICRO)/ltx && touch $@
micro-video: $(MICRO)/.made-video
chaos-programs: $(CHAOS_PROGS)

# A campaign that is interrupted goes on where it was; CHAOS_HOME keeps its records and failed runs.
KILLS  ?= 20000
SEED   ?= 1
JOBS_AT_A_TIME = $(if $(filter command environment,$(firstword $(origin JOBS))),$(JOBS),1)
STEPS  ?= 1000
PIPELINE ?= examples/micro/pipeline.toml
CHAOS_TAR ?= $(if $(findstring micro/video,$(PIPELINE)),$(MICRO)/clips/clips-00000.tar,$(if $(findstring micro/buckets,$(PIPELINE)),$(MICRO)/sizes/sizes-00000.tar,$(if \
             $(findstring micro,$(PIPELINE)),$(MICRO)/data/micro-00000.tar)))
CHAOS_HOME ?= $(BUILD)/chaos/$(notdir $(patsubst %/,%,$(dir $(PIPELINE))))
REPORT ?= docs/reliability.md
CHAOS_COMMIT = $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)$(shell git diff --quiet HEAD -- \
               base config shm bus kernels stages supervisor 2>/dev/null || echo +)
chaos: deps
	$(Q)$(MAKE) -s -j$(shell nproc) all chaos-programs micro-data $(if $(findstring micro/video,$(PIPELINE)),micro-video)
	$(Q)rc=0; $(CHAOS_DIR)/chaos --build $(BUILD) --pipeline $(PIPELINE) --home $(CHAOS_HOME) --kills $(KILLS) \
	    --seed $(SEED) --jobs $(JOBS_AT_A_TIME) --steps $(STEPS) --commit $(CHAOS_COMMIT) \
	    $(if $(CHAOS_TAR),--tar $(CHAOS_TAR)) $(CHAOS_ARGS) || rc=$$?; \
	$(CHAOS_DIR)/chaos --report $(REPORT) --notes tests/chaos/notes.md $(sort $(wildcard $(BUILD)/chaos/*) $(CHAOS_HOME)) && echo "report: $(REPORT)"; \
	exit $$rc

chaos-nets: DEPS += python3
chaos-nets: deps
	$(Q)$(MAKE) -s -j$(shell nproc) all example-data e2e-programs
	$(Q)python3 tests/chaos/nets.py --build $(BUILD) --home $(BUILD)/chaos-nets --seed $(SEED) --runs $(or $(RUNS),200) \
	    --jobs $(shell nproc) $(if $(ONLY),--only $(ONLY)) $(if $(STAND_IN),--stand-in)

chaos-hosts: KILLS = 500
chaos-hosts: DEPS += iproute2
chaos-hosts: deps
	$(Q)$(MAKE) -s -j$(shell nproc) all example-data micro-data e2e-programs
	$(Q)tests/hosts/campaign.sh $(BUILD) --kills $(KILLS) --deaths $(or $(DEATHS),100) --cuts $(or $(CUTS),50) \
	    --leaders $(or $(LEADERS),20) --seed $(SEED) $(CHAOS_ARGS)

chaos-bundle: $(filter-out %/lg-emoji,$(PROGS)) $(HOST_SO) chaos-programs micro-data
	$(Q)bundle/bundle.sh $(BUILD) $(BUILD)/chaos-bundle chaos
