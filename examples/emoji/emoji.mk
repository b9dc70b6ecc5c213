# The example's data set: colour emoji of the distribution's font, as WebDataset shards.
# FreeType and HarfBuzz are linked by this one program alone.

EMOJI_DATA  := examples/emoji/data
EMOJI_STAMP := $(EMOJI_DATA)/.made
EMOJI_FONT  := /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf
EMOJI_NAMES := /usr/share/unicode/emoji/emoji-test.txt

$(BUILD)/obj/stages/tools/emoji.c.o: CPPFLAGS += $(shell pkg-config --cflags freetype2 harfbuzz 2>/dev/null)
$(BUILD)/bin/lg-emoji: LIBS += -lfreetype -lharfbuzz

example-data: $(EMOJI_STAMP)

# Made again when what decides the bytes is newer; the program itself is an order-only prerequisite,
# since linking it anew does not change them.
$(EMOJI_STAMP): $(addprefix stages/,tools/emoji.c io/resize.c io/picture_png.c io/tar_write.c) \
                $(wildcard $(EMOJI_FONT) $(EMOJI_NAMES)) | $(BUILD)/bin/lg-emoji
	@echo "  DATA  $(EMOJI_DATA)"
	$(Q)rm -rf $(EMOJI_DATA) && $(BUILD)/bin/lg-emoji --font $(EMOJI_FONT) --names $(EMOJI_NAMES) \
	    $(EMOJI_DATA)/.new
	$(Q)mv $(EMOJI_DATA)/.new/*.tar $(EMOJI_DATA)/ && rmdir $(EMOJI_DATA)/.new && touch $@
