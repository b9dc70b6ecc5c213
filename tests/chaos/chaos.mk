# The crash campaign; tests/chaos/README.md says what it does.
#
# Targets: micro-data   models and pictures of examples/micro
# Targets: chaos        the crash campaign: KILLS=20000 SEED=1 JOBS=1; writes docs/reliability.md

CHAOS_DIR   := $(BUILD)/tests/chaos
CHAOS_OBJ   := $(patsubst %,$(BUILD)/obj/%.o,$(filter-out tests/chaos/make_micro.c tests/chaos/ledger_check.c \
               tests/chaos/shim.c,$(wildcard tests/chaos/*.c)))
CHAOS_PROGS := $(CHAOS_DIR)/chaos $(CHAOS_DIR)/make_micro $(CHAOS_DIR)/ledger_check $(CHAOS_DIR)/libchaos.so
MICRO       := examples/micro/made
SPIECE      := examples/emoji/text_encoder/spiece.model

$(CHAOS_DIR)/make_micro: $(BUILD)/obj/tests/chaos/make_micro.c.o $(LIB)
	$(LINK)
$(CHAOS_DIR)/chaos: $(CHAOS_OBJ) $(LIB)
	$(LINK)
# No code of ours in it: it knows the ledger from its description alone.
$(CHAOS_DIR)/ledger_check: tests/chaos/ledger_check.c
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) -std=c17 -g -O2 -D_GNU_SOURCE $(CWARN) $(SANFLAGS) -o $@ $< -lxxhash
# Loaded into every process of a run, so without sanitizers.
$(CHAOS_DIR)/libchaos.so: tests/chaos/shim.c tests/chaos/shim.h tests/chaos/calls.def
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) -std=c17 -g -O2 -D_GNU_SOURCE -I. -fPIC -shared $(CWARN) -o $@ $< -ldl

.PHONY: micro-data chaos chaos-programs
$(MICRO)/.made: tests/chaos/make_micro.c $(SPIECE) | $(CHAOS_DIR)/make_micro
	@echo "  DATA  $(MICRO)"
	$(Q)rm -rf $(MICRO) && $(CHAOS_DIR)/make_micro $(SPIECE) $(MICRO) && touch $@
micro-data: $(MICRO)/.made
chaos-programs: $(CHAOS_PROGS)
