# Simulations whose real code runs over pretended calls: such a test program is linked with the file
# that pretends, and with --wrap for each name in the file's list.
comma := ,
wrap_calls = $(addprefix -Wl$(comma)--wrap=,$(shell cat $(1)))

$(BUILD)/tests/test_sim_disk: $(BUILD)/obj/tests/sim/disk.c.o
$(BUILD)/tests/test_sim_disk: LIBS := $(BUILD)/obj/tests/sim/disk.c.o $(LIB) $(LIBS)
$(BUILD)/tests/test_sim_disk: LDFLAGS += $(call wrap_calls,tests/sim/disk.calls)

$(BUILD)/tests/test_sim_supervisor: $(BUILD)/obj/tests/sim/supervisor.c.o
$(BUILD)/tests/test_sim_supervisor: LIBS := $(BUILD)/obj/tests/sim/supervisor.c.o $(LIB) $(LIBS)
$(BUILD)/tests/test_sim_supervisor: LDFLAGS += $(call wrap_calls,tests/sim/supervisor.calls)

# (private: not for what the programs need to be there.)
FAULTS := $(addprefix $(BUILD)/tests/test_,faults faults_supervise ckpt)
$(FAULTS): $(BUILD)/obj/tests/sim/faults.c.o
$(FAULTS): private LIBS := $(BUILD)/obj/tests/sim/faults.c.o $(LIB) $(LIBS)
$(FAULTS): private LDFLAGS += $(call wrap_calls,tests/sim/faults.calls)

# Its clock jumps; its GPU is a stand-in.
$(BUILD)/tests/test_ckpt: | $(BUILD)/tests/stub/liblg-cuda.so
$(BUILD)/tests/test_ckpt: private LDFLAGS += -Wl,--wrap=lg_now_ns

# systemctl is a script of the test.
$(BUILD)/tests/test_units: private LDFLAGS += -Wl,--wrap=lg_child_capture,--wrap=execl

# What it asks of /proc and of the control group, the test tells.
$(BUILD)/tests/test_region: private LDFLAGS += -Wl,--wrap=open
