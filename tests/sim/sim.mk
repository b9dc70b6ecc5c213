# Simulations whose real code runs over pretended calls: such a test program is linked with the files
# that pretend, and with --wrap for each name in the file's list.
comma := ,
wrap_calls = $(addprefix -Wl$(comma)--wrap=,$(shell cat $(1)))

# $(call simulation,PROGRAM,FILES,LIST)   (private: not for what the programs need to be there)
define simulation
$(BUILD)/tests/$(1): $(2:%=$(BUILD)/obj/tests/sim/%.c.o)
$(BUILD)/tests/$(1): private LIBS := $(2:%=$(BUILD)/obj/tests/sim/%.c.o) $(LIBS)
$(BUILD)/tests/$(1): private LDFLAGS += $(call wrap_calls,tests/sim/$(3).calls)
endef
$(eval $(call simulation,test_sim_disk,disk disk_nodes disk_world,disk))
$(eval $(call simulation,test_sim_supervisor,supervisor machine_processes machine_swaps machine_memory machine_calls machine_lgsup,supervisor))
$(eval $(call simulation,test_heartbeat,slow,slow))
$(foreach t,faults faults_shm faults_supervise ckpt,$(eval $(call simulation,test_$(t),faults,faults)))
$(foreach t,cgroup check,$(eval $(call simulation,test_$(t),control_groups,control_groups)))

# Its clock jumps; its GPU is a stand-in.
$(BUILD)/tests/test_ckpt $(BUILD)/tests/test_transfer: | $(BUILD)/tests/stub/liblg-cuda.so
$(BUILD)/tests/test_ckpt: private LDFLAGS += -Wl,--wrap=lg_now_ns

# A rank dies in the middle of an update.
$(BUILD)/tests/test_moments: private LDFLAGS += -Wl,--wrap=lg_adamw,--wrap=lg_adamw8,--wrap=lg_stream_sync

# systemctl is a script of the test.
$(BUILD)/tests/test_units_run: private LDFLAGS += -Wl,--wrap=lg_capture_begin,--wrap=lg_capture_end,--wrap=execl

# What it asks of /proc and of the control group, the test tells.
$(BUILD)/tests/test_region: private LDFLAGS += -Wl,--wrap=open

# What an operation refuses is a failed assertion, which it goes on from.
$(BUILD)/tests/test_ops_checks: private LDFLAGS += -Wl,--wrap=lg_assert_failed

# No threads, when the test says so.
$(BUILD)/tests/test_worker: private LDFLAGS += -Wl,--wrap=pthread_create

# Its disk takes ten seconds for an fsync.
$(BUILD)/tests/test_supervise_blocked: private LDFLAGS += -Wl,--wrap=fsync
