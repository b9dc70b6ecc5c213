# Fuzzing: tests/fuzz/<x>.c is one target. `make fuzz` builds each with Debian's clang and libFuzzer in
# $(BUILD)-fuzz and runs it for FUZZ_S seconds; the same files, compiled as everything else, are linked
# into tests/unit/test_fuzz_corpus.c, which replays the corpora in `make check`.
#
# Variables: FUZZ_S=seconds per target (20), FUZZ_JOBS=targets at a time (cores), FUZZ_ONLY="tar toml",
#            FUZZ_SEED=n (0: another each time).

FUZZ_S    ?= 20
FUZZ_JOBS ?= $(JOBS)
FUZZ_SRC  := $(wildcard tests/fuzz/*.c)
FUZZ_OBJ  := $(FUZZ_SRC:%=$(BUILD)/obj/%.o)
FUZZ_PROGS := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(filter-out tests/fuzz/fuzz.c,$(FUZZ_SRC)))

$(BUILD)/tests/test_fuzz_corpus: $(FUZZ_OBJ) | $(AV_SO)
$(BUILD)/tests/test_fuzz_corpus: LIBS := $(FUZZ_OBJ) $(LIBS)

# Set by `make fuzz` for its own make.
ifdef FUZZ_BUILD
CFLAGS   += -fsanitize=fuzzer-no-link
CXXFLAGS += -fsanitize=fuzzer-no-link
CPPFLAGS += -DLG_FUZZ_ENTRY
endif

$(BUILD)/fuzz/%: $(BUILD)/obj/tests/fuzz/%.c.o $(BUILD)/obj/tests/fuzz/fuzz.c.o $(LIB)
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CXX) $(LDFLAGS) -fsanitize=fuzzer -o $@ $(filter %.o,$^) $(LIB) $(LIBS)

$(BUILD)/fuzz/clip: | $(AV_SO)

.PHONY: fuzz fuzz-programs fuzz-deps
fuzz-programs: $(FUZZ_PROGS)
FUZZ_DEPS := clang libclang-rt-dev
fuzz-deps: DEPS += $(FUZZ_DEPS)
fuzz-deps: deps
fuzz: fuzz-deps
	$(Q)$(MAKE) -s -j$(JOBS) BUILD=$(BUILD)-fuzz FUZZ_BUILD=1 CC=clang CXX=clang++ SAN=address OPT=-O1 \
	    WARN=-w CWARN=-w fuzz-programs
	$(Q)FUZZ_ONLY="$(FUZZ_ONLY)" FUZZ_SEED="$(FUZZ_SEED)" tests/fuzz/run.sh $(BUILD)-fuzz $(FUZZ_S) $(FUZZ_JOBS)
