# Build, test and install. `make help` lists the targets.
#
# Nothing here names a source file: every .c/.cpp under the library folders goes into one archive
# (build/lib/liblg.a); stages/<role>/main.c becomes build/bin/lg-<role>; stages/tools/<x>.c becomes
# build/bin/lg-<x> (lg-random-model has all of stages/tools/random/ too); supervisor/{lgsup,keeper}_main.c
# become lgsup and lg-keeper; each folder kernels/<backend> becomes build/lib/liblg-<backend>.so;
# tests/unit/test_<x>.c becomes a program.
#
# Targets: all          build into build/ (default)
# Targets: deps         install the Debian packages, nothing else
# Targets: example-data make the emoji pictures
# Targets: quickstart   train on them and draw
# Targets: finetune     after it: an adapter that learns a new word
# Targets: example-video make the clips of emoji
# Targets: quickstart-video train on them and draw
# Targets: check        the tests of every change: ten minutes on two cores
# Targets: check-all    every test, with fresh seeds and inputs
# Targets: unit         unit tests only
# Targets: check-systemd a run as units of a real systemd, in a container (root)
# Targets: check-slurm   examples/slurm under a real Slurm on pretended hosts (root)
# Targets: mutants      plants bugs, which the tests must notice (docs/mutants.md)
# Targets: coverage     branches of shm, bus, supervisor and the checkpoint writer
# Targets: bench        figures as JSON lines (docs/bench.md)
# Targets: fuzz         every parser of untrusted bytes, FUZZ_S seconds each
# Targets: format       clang-format over the sources
# Targets: install      into PREFIX (default /usr/local), DESTDIR is honoured
# Targets: clean        remove build/
#
# Variables: BUILD=dir (default build), SAN=address|thread (sanitizer build), CUDA=0|1, V=1.

BUILD   ?= build
CC      ?= gcc
CXX     ?= g++
NVCC    ?= nvcc
PREFIX  ?= /usr/local
AR      ?= ar

WARN     := -Wall -Wextra -Werror -Wshadow -Wpointer-arith -Wwrite-strings -Wvla -Wno-unused-parameter
CWARN    := $(WARN) -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition
OPT      ?= -O2
DEBUG    ?= $(if $(SAN),-g1,-g)
CPPFLAGS += -I. -I$(BUILD)/gen -D_GNU_SOURCE -D_FORTIFY_SOURCE=2
CFLAGS   += -std=c17 $(DEBUG) $(OPT) -fPIC -fno-math-errno -ffp-contract=off -fvisibility=hidden
CXXFLAGS += -std=c++17 $(DEBUG) $(OPT) -fPIC -fvisibility=hidden
# DT_RPATH, not DT_RUNPATH: it also serves the libraries' own needs when they are brought along (bundle/).
LDFLAGS  += -Wl,--as-needed -rdynamic -Wl,--disable-new-dtags -Wl,-rpath,'$$ORIGIN/../lib'
LIBS     := -lzmq -lucp -lucs -lsystemd -lmsgpackc -lcjson -lxxhash -larchive -ljpeg -lpng -lwebp -lwebpdemux -lwebpmux -lsentencepiece -lutf8proc \
            -lncursesw -ltinfo -lstdc++ -ldl -lpthread -lm
ifdef SAN
ifeq ($(SAN),address)
SANFLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else
SANFLAGS := -fsanitize=$(SAN) -fno-omit-frame-pointer
endif
CPPFLAGS := $(filter-out -D_FORTIFY_SOURCE=2,$(CPPFLAGS))
# Sanitizers' own branches make gcc warn of what the plain build does not see.
WARN     += -Wno-error
CWARN    += -Wno-error
CFLAGS   += $(SANFLAGS)
CXXFLAGS += $(SANFLAGS)
LDFLAGS  += $(SANFLAGS)
endif
SUPERVISOR_DIRS := $(addprefix supervisor/,run hosts views core launch commands)
# Counts branches where the promise is kept; see tests/coverage.sh.
ifdef COVERAGE
$(foreach d,shm bus $(subst /,_,$(SUPERVISOR_DIRS)) stages_ckpt,$(eval CFLAGS_$(d) += -Og --coverage -fprofile-update=atomic))
LDFLAGS  += --coverage -Wl,-u,__gcov_dump # which tests/unit/scratch.c may call
endif
Q := $(if $(V),,@)

LIB_DIRS := base config shm bus kernels/graph stages/nets stages/io stages stages/loader stages/text stages/vae \
            stages/trainer stages/ema stages/ckpt stages/exchange stages/sample stages/encode \
            $(SUPERVISOR_DIRS)
ifdef FUZZ_BUILD # what the targets call
LIB_DIRS := base config shm bus kernels/graph stages/nets stages/io
endif
LIB_SRC  := $(filter-out %/main.c supervisor/%_main.c,$(foreach d,$(LIB_DIRS),$(wildcard $(d)/*.c $(d)/*.cpp))) \
            $(wildcard kernels/*.c)
LIB_OBJ  := $(LIB_SRC:%=$(BUILD)/obj/%.o)
LIB      := $(BUILD)/lib/liblg.a

ROLE_MAINS := $(wildcard stages/*/main.c)
TOOLS      := $(wildcard stages/tools/*.c)
PROGS := $(patsubst stages/%/main.c,$(BUILD)/bin/lg-%,$(ROLE_MAINS)) \
         $(patsubst stages/tools/%.c,$(BUILD)/bin/lg-%,$(TOOLS)) \
         $(patsubst supervisor/lgsup_main.c,$(BUILD)/bin/lgsup,$(wildcard supervisor/lgsup_main.c)) \
         $(patsubst supervisor/keeper_main.c,$(BUILD)/bin/lg-keeper,$(wildcard supervisor/keeper_main.c))

HOST_SO  := $(BUILD)/lib/liblg-host.so
REF64_SO := $(BUILD)/lib/liblg-ref64.so
BACKENDS := $(HOST_SO) $(REF64_SO)
# Films (stages/io/clip_read.h, clip_write.h): what links libav is loaded with the first one.
AV_SO    := $(BUILD)/lib/liblg-av.so

UNIT_SRC := $(wildcard tests/unit/test_*.c)
UNIT     := $(UNIT_SRC:tests/unit/%.c=$(BUILD)/tests/%)
TEST_LIB_SRC := $(filter-out tests/unit/test_%.c,$(wildcard tests/unit/*.c))
TEST_LIB_OBJ := $(TEST_LIB_SRC:%=$(BUILD)/obj/%.o)
TEST_LIB     := $(BUILD)/lib/libtest.a
E2E_SRC   := $(wildcard tests/e2e/*.c)
E2E       := $(E2E_SRC:tests/e2e/%.c=$(BUILD)/tests/e2e/%)
# Stand-ins for a GPU's backend and driver (tests/e2e/gpus.sh).
STUB      := $(BUILD)/tests/stub/liblg-cuda.so $(BUILD)/tests/stub/driver/libcuda.so.1
# A disk that stalls (tests/bench/bench_loop.c).
STALL     := $(BUILD)/tests/stub/libstall.so
BENCH_SRC := $(wildcard tests/bench/*.c)
BENCH     := $(BENCH_SRC:tests/bench/%.c=$(BUILD)/tests/bench/%)

.DEFAULT_GOAL := all
.PHONY: all help deps example-data example-video quickstart quickstart-video finetune check check-all check-systemd check-slurm mutants coverage unit unit-programs e2e-programs bench fuzz format install clean
.SECONDARY:

all: $(PROGS) $(BACKENDS) $(AV_SO)

# Tests take half as long to compile as what they test. What they compute in is the library's.
$(BUILD)/obj/tests/unit/%.c.o $(BUILD)/obj/tests/sim/%.c.o: OPT = -O1
# The longest of all to compile, for files of some KB.
$(BUILD)/obj/config/toml.cpp.o: OPT = $(if $(SAN),-O0,-O1)
$(BUILD)/obj/tests/unit/isas.c.o: CPPFLAGS += -DISAS='"$(ISAS)"'
$(BUILD)/obj/%.c.o: %.c
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(CWARN) $(CFLAGS_$(subst /,_,$(*D))) -MMD -MP -c $< -o $@
$(BUILD)/obj/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	@echo "  CXX   $<"
	$(Q)$(CXX) $(CPPFLAGS) $(CXXFLAGS) $(WARN) -MMD -MP -c $< -o $@

$(LIB): $(LIB_OBJ)
	@mkdir -p $(@D)
	@echo "  AR    $@"
	$(Q)rm -f $@ && $(AR) rcs $@ $(LIB_OBJ)

# Loops over pixels become loops over whole vectors.
$(foreach f,clip_rgb fit resize,$(BUILD)/obj/stages/io/$(f).c.o): CFLAGS += -O3
# The headers that programs and it must agree on.
AV_HEADERS := $(wildcard stages/io/clip_*.h stages/io/clip_*.def)
$(BUILD)/obj/stages/io/av.c.o $(BUILD)/obj/stages/io/av/interface.c.o: $(AV_HEADERS)
$(BUILD)/obj/stages/io/av.c.o $(BUILD)/obj/stages/io/av/interface.c.o: CPPFLAGS += \
    -DLG_AV_INTERFACE='"lg-av-$(shell cat $(AV_HEADERS) | sha256sum | cut -c1-16)"'
$(AV_SO): $(patsubst %.c,$(BUILD)/obj/%.c.o,$(wildcard stages/io/av/*.c) stages/io/clip_index.c stages/io/clip_bytes.c \
    base/err.c base/heartbeat.c base/log.c base/printable.c base/utf8.c base/clock.c)
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -shared -o $@ $^ -lavformat -lavcodec -lavutil -lm

# The unit templates are part of the program.
$(BUILD)/obj/supervisor/commands/units_write.c.o: $(wildcard systemd/*.in)

LINK = @mkdir -p $(@D); echo "  LD    $@"; $(if $(V),set -x;,) $(CC) $(LDFLAGS) -o $@ $(filter %.o,$^) $(LIB) $(LIBS)

$(BUILD)/bin/lg-keeper: $(BUILD)/obj/supervisor/keeper_main.c.o $(LIB)
	$(LINK)
$(BUILD)/bin/lgsup: $(BUILD)/obj/supervisor/lgsup_main.c.o $(LIB)
	$(LINK)
$(foreach r,$(patsubst stages/%/main.c,%,$(ROLE_MAINS)),$(eval $(BUILD)/bin/lg-$(r): $(BUILD)/obj/stages/$(r)/main.c.o))
$(foreach t,$(patsubst stages/tools/%.c,%,$(TOOLS)),$(eval $(BUILD)/bin/lg-$(t): $(BUILD)/obj/stages/tools/$(t).c.o))
$(BUILD)/bin/lg-random-model: $(patsubst %.c,$(BUILD)/obj/%.c.o,$(wildcard stages/tools/random/*.c))
$(patsubst stages/%/main.c,$(BUILD)/bin/lg-%,$(ROLE_MAINS)) $(patsubst stages/tools/%.c,$(BUILD)/bin/lg-%,$(TOOLS)): $(LIB)
	$(LINK)

include kernels/kernels.mk
include tests/gpu/gpu.mk
include examples/emoji/emoji.mk
include examples/emoji-video/emoji-video.mk
include tests/fuzz/fuzz.mk
include bundle/bundle.mk
include tests/sim/sim.mk
include tests/chaos/chaos.mk

# What the unit tests share. An archive, like the library itself: a program gets what it needs, and is linked in half
# the time. They need each other in turns.
$(TEST_LIB): $(TEST_LIB_OBJ)
	@mkdir -p $(@D)
	@echo "  AR    $@"
	$(Q)rm -f $@ && $(AR) rcs $@ $(TEST_LIB_OBJ)
# gold, where binutils have it, takes half the time of the default linker, for some 300 programs.
TEST_LD := $(if $(shell command -v ld.gold),-fuse-ld=gold)
$(BUILD)/tests/%: $(BUILD)/obj/tests/unit/%.c.o $(TEST_LIB) $(LIB)
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) $(TEST_LD) -o $@ $< -Wl,--start-group $(TEST_LIB) $(LIB) $(LIBS) -Wl,--end-group -lcmocka
$(BUILD)/tests/test_rounding: | $(UNOPTIMIZED_SO)
# Films are made by libav's encoders (tests/unit/clip_fixture.c) and read by its decoders (read_clip.c), and by ours through the
# shared object.
CLIP_TESTS := $(addprefix $(BUILD)/tests/test_,clip_read clip_source clip_write pictures)
$(CLIP_TESTS): LIBS += -lavformat -lavcodec -lavutil
$(CLIP_TESTS): | $(AV_SO)
$(BUILD)/tests/stub/liblg-cuda.so: $(BUILD)/obj/tests/stub/cuda.c.o $(BUILD)/obj/tests/stub/late.c.o $(BUILD)/obj/tests/stub/link.c.o $(BUILD)/obj/kernels/interface.c.o
$(BUILD)/tests/stub/driver/libcuda.so.1: $(BUILD)/obj/tests/stub/driver.c.o
$(STALL): $(BUILD)/obj/tests/stub/stall.c.o
$(STUB) $(STALL):
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) -shared -Wl,-soname,$(@F) -o $@ $^
$(BUILD)/tests/bench/%: $(BUILD)/obj/tests/bench/%.c.o $(LIB)
	$(LINK)
$(BUILD)/tests/e2e/%: $(BUILD)/obj/tests/e2e/%.c.o $(LIB)
	$(LINK)

# Debian packages to build, test and run; the stamp names what was installed.
DEPS := gcc g++ make pkg-config libzmq3-dev libmsgpack-dev libtomlplusplus-dev libdnnl-dev \
        libsentencepiece-dev libutf8proc-dev libcjson-dev libxxhash-dev libcmocka-dev libarchive-dev libpng-dev \
        libjpeg62-turbo-dev libwebp-dev libavformat-dev libavcodec-dev libavutil-dev libfreetype-dev libharfbuzz-dev \
        fonts-noto-color-emoji unicode-data jq libncurses-dev libsystemd-dev libucx-dev
deps:
	$(Q)missing=$$(for p in $(DEPS); do dpkg-query -W -f='$${Status}\n' $$p 2>/dev/null | \
	    grep -q 'install ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	    echo "  APT   $$missing"; \
	    apt-get update -qq -o Acquire::Retries=3 && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq -o Acquire::Retries=3 --no-install-recommends $$missing >/dev/null; fi

# Everything below installs first, then builds in a make of its own with all cores.
JOBS := $(shell nproc)
quickstart: deps
	$(Q)$(MAKE) -s -j$(JOBS) all example-data
	$(Q)$(BUILD)/bin/lgsup start examples/emoji/pipeline.toml

quickstart-video: deps
	$(Q)$(MAKE) -s -j$(JOBS) all example-video
	$(Q)$(BUILD)/bin/lgsup start examples/emoji-video/pipeline.toml

finetune: deps
	$(Q)$(MAKE) -s -j$(JOBS) all example-data
	$(Q)$(BUILD)/bin/lgsup start examples/finetune/pipeline.toml

unit-programs: $(UNIT)
e2e-programs: $(E2E) $(STUB) $(STALL)
unit: all $(UNIT)
	$(Q)UNIT_JOBS=$(JOBS) tests/run_unit.sh $(BUILD)

check check-all: DEPS += python3
check: deps
	$(Q)tests/check.sh $(BUILD) $(JOBS)

check-all: DEPS += $(FUZZ_DEPS) systemd-sysv systemd-container
check-all: deps
	$(Q)CHECK_ALL=1 tests/check.sh $(BUILD) $(JOBS)

check-systemd: DEPS += systemd-sysv systemd-container
check-systemd: deps
	$(Q)$(MAKE) -s -j$(JOBS) all example-data micro-data
	$(Q)tests/systemd/run.sh $(BUILD)

check-slurm: DEPS += slurmctld slurmd slurm-client munge iproute2
check-slurm: deps
	$(Q)$(MAKE) -s -j$(JOBS) all example-data micro-data
	$(Q)tests/slurm/run.sh $(BUILD)

mutants: deps
	$(Q)$(MAKE) -s -j$(JOBS) all example-data unit-programs
	$(Q)tests/mutants/run.sh $(BUILD)

coverage: deps
	$(Q)$(MAKE) -s -j$(JOBS) BUILD=$(BUILD)-cov COVERAGE=1 all unit-programs
	$(Q)tests/coverage.sh $(BUILD)-cov

# Debian's PyTorch is the peer that the training step is raced against.
bench: DEPS += python3-torch
bench: deps
	$(Q)$(MAKE) -s -j$(JOBS) all example-data micro-data $(BENCH) $(STALL)
	$(Q)tests/bench/run.sh $(BUILD)

install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib
	install -m 755 $(PROGS) $(DESTDIR)$(PREFIX)/bin
	install -m 644 $(BACKENDS) $(AV_SO) $(DESTDIR)$(PREFIX)/lib

help:
	@sed -n 's/^# Targets: *//p' $(MAKEFILE_LIST)

format: DEPS += clang-format git
format: deps
	$(Q)git ls-files '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | while read -r f; do \
	    clang-format --dry-run -Werror "$$f" 2>/dev/null || clang-format -i "$$f"; done

clean:
	rm -rf $(BUILD)

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
