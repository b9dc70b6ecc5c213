# A directory with everything a run needs, to be copied to machines without these packages or without root.
#
# Targets: bundle       relocatable directory build/bundle (BUNDLE_HOST=0: GPUs only; BUNDLE_FILMS=1: reads films)

BUNDLE_HOST ?= 1
BUNDLE_FILMS ?= 0
.PHONY: bundle
# The GPU backend goes along where it was built (make cuda), as do its tests (make gpu-bundle); of targets named together they come first.
bundle: | $(filter cuda gpu-bundle gpu-late gpu-ptx,$(MAKECMDGOALS))
bundle: $(filter-out %/lg-emoji %/lg-emoji-video,$(PROGS)) $(if $(filter 0,$(BUNDLE_HOST)),,$(HOST_SO)) $(if $(filter 0,$(BUNDLE_FILMS)),,$(AV_SO))
	$(Q)BUNDLE_FILMS=$(BUNDLE_FILMS) bundle/bundle.sh $(BUILD) $(BUILD)/bundle $(if $(filter 0,$(BUNDLE_HOST)),no-host,host)
