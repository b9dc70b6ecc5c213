# liblg-cuda.so, for machines with an NVIDIA GPU: `make cuda`, where nvcc is installed. Nothing else is
# built from or linked to CUDA. cuDNN is opened at run time.

CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc)))
CUDA_SO   := $(BUILD)/lib/liblg-cuda.so
CUDA_OBJ  := $(patsubst %,$(BUILD)/obj/%.o,$(wildcard kernels/cuda/*.cu kernels/cuda/*.c))
CUDA_FLAGS := -std=c++17 -O3 -lineinfo --compress-mode=size -Werror all-warnings \
              -Xcompiler -fPIC,-fvisibility=hidden,-Wall -I. -D_GNU_SOURCE

# CUDA_ARCHS="80 90": machine code for those GPUs alone, of 80 86 89 90 100 120 (all by default). PTX of 8.0 and of
# 9.0 is always there, for newer GPUs and for LG_CUDA_CAPABILITY. After a change of it: touch kernels/cuda/*.cu.
# What wgmma and the like are for is code of 9.0 alone, and runs on no other GPU.
CUDA_ARCHS  := 80 86 89 90 100 120
CUDA_PTX    := 80 90
CUDA_HOPPER := conv_weight cross_attention gelu_product long_attention long_attention_forward short_attention \
               short_attention_forward tile_conv
CUDA_CODE    = $(foreach a,$(patsubst 90,90a,$(CUDA_ARCHS)),-gencode=arch=compute_$a,code=sm_$a) \
               $(foreach a,$(CUDA_PTX),-gencode=arch=compute_$a,code=compute_$a)
$(CUDA_HOPPER:%=$(BUILD)/obj/kernels/cuda/%.cu.o): CUDA_CODE = -gencode=arch=compute_90a,code=sm_90a

.PHONY: cuda
cuda: $(CUDA_SO)
ifeq ($(CUDA_HOME),)
$(CUDA_OBJ):
	@echo "no nvcc: install CUDA 13, or say where it is with CUDA_HOME=" >&2; exit 1
endif

$(BUILD)/obj/kernels/cuda/%.cu.o: kernels/cuda/%.cu
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(CUDA_HOME)/bin/nvcc $(CUDA_FLAGS) $(CUDA_CODE) -MD -MP -MF $(@:.o=.d) -c $< -o $@
$(BUILD)/obj/kernels/cuda/%.c.o: CPPFLAGS += -isystem $(CUDA_HOME)/include
# DT_RUNPATH here: LD_LIBRARY_PATH may name another CUDA.
$(CUDA_SO): $(CUDA_OBJ) $(SHARED_OBJ)
	@mkdir -p $(@D)
	@echo "  SO    $@"
	$(Q)$(CC) $(LDFLAGS) $(SO_LDFLAGS) -Wl,--enable-new-dtags -Wl,-rpath,'$$ORIGIN:/usr/local/cuda/lib64' -shared -o $@ $(CUDA_OBJ) \
	    $(SHARED_OBJ) -L$(CUDA_HOME)/lib64 -lcublasLt -lcudart_static -lstdc++ -ldl -lrt -lpthread -lm
