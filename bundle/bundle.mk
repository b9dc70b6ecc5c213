# A directory with everything a run needs, to be copied to machines without these packages or without root.
#
# Targets: bundle       relocatable directory build/bundle (BUNDLE_HOST=0: GPUs only)

BUNDLE_HOST ?= 1
.PHONY: bundle
# The GPU backend goes along where it was built (make cuda), as do its tests (make gpu-bundle).
bundle: $(filter-out %/lg-emoji %/lg-emoji-video,$(PROGS)) $(if $(filter 0,$(BUNDLE_HOST)),,$(HOST_SO))
	$(Q)bundle/bundle.sh $(BUILD) $(BUILD)/bundle $(if $(filter 0,$(BUNDLE_HOST)),no-host,host)
