# The backends: one shared object each, opened by name at start.
#
# The host backend's plain C is compiled once per instruction set (no -march=native): the plan names
# the set, the backend picks the matching table, so the bits do not depend on the build machine.
# ISAS picks some, for a build that shall be done sooner; a plan that names another is refused.
# Nor on the options here: -ffp-contract=off comes from CFLAGS, and none of these may change a value
# (-ffast-math and its parts would; -fno-trapping-math is about exceptions alone).

KFLAGS := -O3 -fno-trapping-math -fopenmp
ISAS   ?= sse2 avx2 avx512
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512 $(ISA_avx2)
HOST_C := $(wildcard kernels/host/*.c)
# kernels/host/isa_*.c are compiled once per instruction set; the others once.
HOST_ISA_C := $(wildcard kernels/host/isa_*.c)
HOST_ONE_C := $(filter-out $(HOST_ISA_C),$(HOST_C))
HOST_OBJ := $(HOST_ONE_C:%=$(BUILD)/obj/%.o) \
            $(foreach isa,$(ISAS),$(HOST_ISA_C:%.c=$(BUILD)/obj/%.$(isa).o))
REF64_C  := $(wildcard kernels/ref64/*.c)
REF64_OBJ := $(REF64_C:%=$(BUILD)/obj/%.o)
# A missing operation must fail here and not when a run starts (sanitizers resolve late).
SO_LDFLAGS := $(if $(SAN),,-Wl,--no-undefined)
SHARED_OBJ := $(patsubst %,$(BUILD)/obj/kernels/%.c.o,tensor rows8 streams interface) \
    $(patsubst %,$(BUILD)/obj/base/%.c.o,philox err heartbeat log printable utf8 clock)

$(addprefix $(BUILD)/obj/kernels/,rows8.c.o $(addprefix ref64/,linear.c.o conv.c.o clip.c.o)): CFLAGS += -O3

# The headers that programs and backends must agree on (interface.c, which includes them all).
INTERFACE := $(addprefix kernels/,backend.h device.h info.h link.h ops.h ops.def rows8.h tensor.h)
$(BUILD)/obj/kernels/interface.c.o: CPPFLAGS += -DLG_INTERFACE='"lg-interface-$(shell cat $(INTERFACE) | sha256sum | cut -c1-16)"'

define isa_rule
$(BUILD)/obj/%.$(1).o: %.c
	@mkdir -p $$(@D)
	@echo "  CC    $$< ($(1))"
	$$(Q)$$(CC) $$(CPPFLAGS) $$(CFLAGS) $$(KFLAGS) $$(CWARN) -DLG_ISA=$(1) $$(ISA_$(1)) -MMD -MP -c $$< -o $$@
endef
$(foreach isa,$(ISAS),$(eval $(call isa_rule,$(isa))))

# A build that had other sets is made anew: objects that are missing would not be reason enough (.SECONDARY).
$(BUILD)/obj/isas: FORCE
	@mkdir -p $(@D)
	$(Q)echo '$(ISAS)' | cmp -s - $@ || echo '$(ISAS)' >$@
.PHONY: FORCE
$(HOST_SO) $(BUILD)/obj/tests/unit/isas.c.o: $(BUILD)/obj/isas

$(HOST_SO): $(HOST_OBJ) $(SHARED_OBJ)
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -shared -o $@ $(HOST_OBJ) $(SHARED_OBJ) -ldnnl -lgomp -lm
# The same backend, nothing of it optimized, which must compute the same bits (test_rounding).
UNOPTIMIZED_SO := $(BUILD)/unoptimized/lib/liblg-host.so
$(UNOPTIMIZED_SO): $(HOST_SO)
	$(Q)$(MAKE) -s BUILD=$(BUILD)/unoptimized DEBUG= OPT='-O0 -U_FORTIFY_SOURCE' KFLAGS=-fopenmp $@
$(REF64_SO): $(REF64_OBJ) $(SHARED_OBJ)
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -shared -o $@ $(REF64_OBJ) $(SHARED_OBJ) -lm

include kernels/cuda/cuda.mk
