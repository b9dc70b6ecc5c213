# The example's data sets: colour emoji of the distribution's font, as WebDataset shards. DIR/data has all
# of them, DIR/data-quick those of quickstart.txt; examples/finetune/data those of pictures.txt there.
# FreeType and HarfBuzz are linked by the programs that make them alone.

EMOJI_DATA  := examples/emoji/data
EMOJI_QUICK := examples/emoji/data-quick
EMOJI_LIST  := examples/emoji/quickstart.txt
EMOJI_FINE  := examples/finetune/data
EMOJI_SETS  := $(EMOJI_DATA)/.made $(EMOJI_QUICK)/.made $(EMOJI_FINE)/.made
EMOJI_FONT  := /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf
EMOJI_NAMES := /usr/share/unicode/emoji/emoji-test.txt

EMOJI_FONT_O := $(BUILD)/obj/stages/tools/emoji/font.c.o
EMOJI_PROGS  := $(BUILD)/bin/lg-emoji $(BUILD)/bin/lg-emoji-video
$(EMOJI_FONT_O): CPPFLAGS += $(shell pkg-config --cflags freetype2 harfbuzz 2>/dev/null)
$(EMOJI_PROGS): LIBS += -lfreetype -lharfbuzz
$(EMOJI_PROGS): $(EMOJI_FONT_O)

example-data: $(EMOJI_SETS)

# Made again when what decides the bytes is newer; the program itself is an order-only prerequisite,
# since linking it anew does not change them.
$(EMOJI_QUICK)/.made: EMOJI_ARGS := --list $(EMOJI_LIST)
$(EMOJI_QUICK)/.made: $(EMOJI_LIST)
$(EMOJI_FINE)/.made: EMOJI_ARGS := --list examples/finetune/pictures.txt
$(EMOJI_FINE)/.made: examples/finetune/pictures.txt
$(EMOJI_SETS): $(addprefix stages/,tools/emoji.c tools/emoji/font.c io/resize.c io/picture_png.c io/tar_write.c) \
               $(wildcard $(EMOJI_FONT) $(EMOJI_NAMES)) | $(BUILD)/bin/lg-emoji
	@echo "  DATA  $(@D)"
	$(Q)rm -rf $(@D) && $(BUILD)/bin/lg-emoji --font $(EMOJI_FONT) --names $(EMOJI_NAMES) $(EMOJI_ARGS) $(@D)/.new
	$(Q)mv $(@D)/.new/*.tar $(@D)/ && rmdir $(@D)/.new && touch $@
