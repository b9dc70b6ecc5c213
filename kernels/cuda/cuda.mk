# liblg-cuda.so, for machines with an NVIDIA GPU: `make cuda`, where nvcc is installed. Nothing else is
# built from or linked to CUDA. cuDNN is opened at run time.

CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc)))
CUDA_SO   := $(BUILD)/lib/liblg-cuda.so
CUDA_OBJ  := $(patsubst %,$(BUILD)/obj/%.o,$(wildcard kernels/cuda/*.cu kernels/cuda/*.c))
# wgmma and the like want 90a; the machine code of no other GPU is of use.
CUDA_FLAGS := -std=c++17 -O3 -lineinfo -gencode=arch=compute_90a,code=sm_90a -Werror all-warnings \
              -Xcompiler -fPIC,-fvisibility=hidden,-Wall -I. -D_GNU_SOURCE

.PHONY: cuda
cuda: $(CUDA_SO)
ifeq ($(CUDA_HOME),)
$(CUDA_OBJ):
	@echo "no nvcc: install CUDA 13, or say where it is with CUDA_HOME=" >&2; exit 1
endif

$(BUILD)/obj/kernels/cuda/%.cu.o: kernels/cuda/%.cu
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(CUDA_HOME)/bin/nvcc $(CUDA_FLAGS) -MD -MP -MF $(@:.o=.d) -c $< -o $@
$(BUILD)/obj/kernels/cuda/%.c.o: CPPFLAGS += -isystem $(CUDA_HOME)/include
# DT_RUNPATH here: LD_LIBRARY_PATH may name another CUDA.
$(CUDA_SO): $(CUDA_OBJ) $(SHARED_OBJ)
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -Wl,--enable-new-dtags -Wl,-rpath,'$$ORIGIN:/usr/local/cuda/lib64' -shared -o $@ $(CUDA_OBJ) \
	    $(SHARED_OBJ) -L$(CUDA_HOME)/lib64 -lcublasLt -lcudart_static -lstdc++ -ldl -lrt -lpthread -lm
