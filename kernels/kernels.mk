# The backends: one shared object each, opened by name at start.
#
# The host backend's plain C is compiled once per instruction set (no -march=native): the plan names
# the set, the backend picks the matching table, so the bits do not depend on the build machine.

KFLAGS := -O3 -fno-trapping-math -fno-signed-zeros -fopenmp
HOST_C := $(wildcard kernels/host/*.c)
# kernels/host/isa_*.c are compiled once per instruction set; the others once.
HOST_ISA_C := $(wildcard kernels/host/isa_*.c)
HOST_ONE_C := $(filter-out $(HOST_ISA_C),$(HOST_C))
HOST_OBJ := $(HOST_ONE_C:%=$(BUILD)/obj/%.o) \
            $(HOST_ISA_C:%.c=$(BUILD)/obj/%.sse2.o) \
            $(HOST_ISA_C:%.c=$(BUILD)/obj/%.avx2.o) \
            $(HOST_ISA_C:%.c=$(BUILD)/obj/%.avx512.o)
REF64_C  := $(wildcard kernels/ref64/*.c)
REF64_OBJ := $(REF64_C:%=$(BUILD)/obj/%.o)
# A missing operation must fail here and not when a run starts (sanitizers resolve late).
SO_LDFLAGS := $(if $(SAN),,-Wl,--no-undefined)
SHARED_OBJ := $(BUILD)/obj/kernels/tensor.c.o $(BUILD)/obj/base/philox.c.o $(BUILD)/obj/base/err.c.o $(BUILD)/obj/base/log.c.o $(BUILD)/obj/base/clock.c.o

$(BUILD)/obj/%.sse2.o: %.c
	@mkdir -p $(@D)
	@echo "  CC    $< (sse2)"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(KFLAGS) $(CWARN) -DLG_ISA=sse2 -MMD -MP -c $< -o $@
$(BUILD)/obj/%.avx2.o: %.c
	@mkdir -p $(@D)
	@echo "  CC    $< (avx2)"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(KFLAGS) $(CWARN) -DLG_ISA=avx2 -mavx2 -mfma -mf16c -ffp-contract=fast -MMD -MP -c $< -o $@
$(BUILD)/obj/%.avx512.o: %.c
	@mkdir -p $(@D)
	@echo "  CC    $< (avx512)"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(KFLAGS) $(CWARN) -DLG_ISA=avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512 -ffp-contract=fast -MMD -MP -c $< -o $@

$(HOST_SO): $(HOST_OBJ) $(SHARED_OBJ)
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -shared -o $@ $(HOST_OBJ) $(SHARED_OBJ) -ldnnl -lgomp -lm
$(REF64_SO): $(REF64_OBJ) $(SHARED_OBJ)
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -shared -o $@ $(REF64_OBJ) $(SHARED_OBJ) -lm

include kernels/cuda/cuda.mk
