# The video example's data set: clips of emoji of the distribution's font, as WebDataset shards of animated WebP, and the captions
# that are held out (stages/tools/emoji-video.c).

CLIPS      := examples/emoji-video/data
CLIPS_LIST := examples/emoji-video/emoji.txt

example-video: $(CLIPS)/.made

$(CLIPS)/.made: $(CLIPS_LIST) $(addprefix stages/,tools/emoji-video.c tools/emoji/font.c tools/emoji/motions.def \
                  io/clip_write_webp.c io/tar_write.c) $(wildcard $(EMOJI_FONT) $(EMOJI_NAMES)) | $(BUILD)/bin/lg-emoji-video
	@echo "  DATA  $(@D)"
	$(Q)rm -rf $(@D) && $(BUILD)/bin/lg-emoji-video --font $(EMOJI_FONT) --names $(EMOJI_NAMES) --list $(CLIPS_LIST) $(@D)/.new
	$(Q)mv $(@D)/.new/* $(@D)/ && rmdir $(@D)/.new && touch $@
