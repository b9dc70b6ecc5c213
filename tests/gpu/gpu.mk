# Tests of the CUDA backend. They are built where nvcc and the Debian packages are, and run on a machine
# with a GPU that has neither: $(BUILD)/gpu is self-contained apart from CUDA's libraries.
#
# Targets: cuda         the GPU backend, where nvcc is
# Targets: gpu-bundle   its tests as a folder for a machine with a GPU
# Targets: gpu-late     with them, a backend whose warps come late at random (come_late in wgmma.cuh)
# Targets: gpu-ptx      with them, a backend of PTX 8.0, which the driver compiles: older GPUs' code on a newer one
# Targets: gpu-fits     whether the kernels fit every GPU that this build has code for, without one (tests/e2e/gpu_fits.sh)
# Targets: check-gpu    every test for GPUs, from the bundle (GPU_DATA: the emoji shards)
# Targets: late-gpu     its tests with that backend, from the bundle
# Targets: sanitize-gpu  the operations under memcheck, initcheck and racecheck, from the bundle; older GPUs' too
# Targets: bench-gpu    every figure of docs/gpu-results.md, from the bundle

GPU_SRC := $(wildcard tests/gpu/test_*.c) $(wildcard tests/gpu/bench_*.c)
GPU     := $(GPU_SRC:tests/gpu/%.c=$(BUILD)/gpu/bin/%)
GPU_LIB_OBJ := $(patsubst %,$(BUILD)/obj/tests/unit/%.c.o,op_args op_cases denoiser_fixture)
GPU_OWN_OBJ := $(BUILD)/obj/tests/gpu/op_times.c.o
# Small libraries that the GPU machine may lack.
GPU_CARRIED := libxxhash.so.0 libcjson.so.1

.PHONY: check-gpu gpu-fits gpu-bundle gpu-late gpu-ptx late-gpu bench-gpu sanitize-gpu whole-bundle
gpu-bundle: $(GPU) $(CUDA_SO) $(REF64_SO)
	@mkdir -p $(BUILD)/gpu/lib
	$(Q)cp -u $(CUDA_SO) $(REF64_SO) $(BUILD)/gpu/lib/
	$(Q)for l in $(GPU_CARRIED); do cp -uL $$($(CC) -print-file-name=$$l) $(BUILD)/gpu/lib/; done
	$(Q)cp -u tests/gpu/run.sh tests/gpu/sanitize.sh $(BUILD)/gpu/
# A folder of backends for $LG_BACKEND_DIR.
LATE_SO := $(BUILD)/late/lib/liblg-cuda.so
gpu-late: gpu-bundle
	$(Q)$(MAKE) -s BUILD=$(BUILD)/late CUDA_ARCHS=90 CUDA_PTX= CUDA_FLAGS='$(CUDA_FLAGS) -DLG_LATE' $(LATE_SO)
	@mkdir -p $(BUILD)/gpu/late
	$(Q)cp -u $(LATE_SO) $(REF64_SO) $(BUILD)/gpu/late/
PTX_SO := $(BUILD)/ptx/lib/liblg-cuda.so
gpu-ptx: gpu-bundle
	$(Q)$(MAKE) -s BUILD=$(BUILD)/ptx CUDA_ARCHS= CUDA_PTX=80 $(PTX_SO)
	@mkdir -p $(BUILD)/gpu/ptx
	$(Q)cp -u $(PTX_SO) $(REF64_SO) $(BUILD)/gpu/ptx/
# The real kernels over a stand-in for CUDA's runtime.
FITS_SO := $(BUILD)/tests/fits/liblg-cuda.so
$(BUILD)/obj/tests/stub/cudart.c.o: CPPFLAGS += -isystem $(CUDA_HOME)/include
$(FITS_SO): $(CUDA_OBJ) $(SHARED_OBJ) $(BUILD)/obj/tests/stub/cudart.c.o
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -shared -Wl,-z,defs -o $@ $^ -lstdc++ -ldl -lrt -lpthread -lm
gpu-fits: $(FITS_SO) $(GPU) $(REF64_SO) $(BUILD)/tests/stub/driver/libcuda.so.1
	$(Q)ln -sf ../../lib/liblg-ref64.so $(BUILD)/tests/fits/
	$(Q)tests/e2e/gpu_fits.sh $(BUILD)
# From the bundle; built first where there is none: a machine that was given build/bundle needs only make.
GPU_DATA ?= examples/emoji/data
check-gpu bench-gpu late-gpu sanitize-gpu: | $(if $(wildcard $(BUILD)/bundle/gpu/check.sh),,whole-bundle)
check-gpu:
	$(Q)$(BUILD)/bundle/gpu/check.sh $(GPU_DATA)
bench-gpu:
	$(Q)$(BUILD)/bundle/gpu/bench.sh $(BENCH_DATA)
late-gpu:
	$(Q)LG_BACKEND_DIR=$(BUILD)/bundle/gpu/late $(BUILD)/bundle/gpu/run.sh
sanitize-gpu:
	$(Q)$(BUILD)/bundle/gpu/sanitize.sh
	$(Q)LG_CUDA_CAPABILITY=8.0 $(BUILD)/bundle/gpu/sanitize.sh
whole-bundle: gpu-late gpu-ptx
	$(Q)$(MAKE) -s bundle

# They find their libraries beside themselves, and in a bundle's gpu/bin those of the bundle.
$(BUILD)/gpu/bin/%: LDFLAGS += -Wl,-rpath,'$$ORIGIN/../../lib'
# The benches record CUDA events of their own.
$(GPU_OWN_OBJ): CPPFLAGS += -isystem $(CUDA_HOME)/include
$(filter $(BUILD)/gpu/bin/bench_%,$(GPU)): $(GPU_OWN_OBJ)
$(BUILD)/gpu/bin/bench_%: LIBS += $(GPU_OWN_OBJ) -L$(CUDA_HOME)/lib64 -lcudart_static -lrt
$(BUILD)/gpu/bin/%: $(BUILD)/obj/tests/gpu/%.c.o $(GPU_LIB_OBJ) $(LIB)
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $< $(GPU_LIB_OBJ) $(LIB) $(LIBS)
