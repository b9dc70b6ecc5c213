/* Colour emoji of the distribution's font, by name, as pictures: what lg-emoji and lg-emoji-video make their data sets of.
 * FreeType and HarfBuzz are linked by these two programs alone.
 *
 * Fully-qualified emoji of emoji-test.txt (package unicode-data) are shaped with HarfBuzz into one glyph of NotoColorEmoji.ttf
 * (fonts-noto-color-emoji); those it has no glyph for are left out. The picture: the glyph's bitmap cut to the box of its
 * visible pixels, centred on a white square two pixels larger than the box's longer side at each end. White shows through the
 * soft edges twice (the glyph lies over white, and that over white again with the same alpha): the example's autoencoder was
 * trained on pictures with edges of this kind. The same packages give the same bytes. */
#pragma once
#include "stages/io/picture.h"

#define EMOJI_FONT  "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
#define EMOJI_NAMES "/usr/share/unicode/emoji/emoji-test.txt"

enum { EMOJI_ONLY_MAX = 1024 };

struct emoji_options {
    const char *font, *names; /* files */
    const char *
        list; /* a text file with names, or NULL: one a line; lines that are empty or begin with # are skipped;
                                 "NAME = CAPTION" gives that one another caption */
    const char
        *only[EMOJI_ONLY_MAX]; /* names beside those of the list; neither: all of emoji-test.txt */
    int n_only;
};

struct emoji {
    const char *name, *caption; /* valid until the next one */
    lg_picture picture;         /* square */
};

typedef struct emoji_set emoji_set;

/* LG_ERR_NOTFOUND: a file is missing, with the package that has it; LG_ERR_CONFIG: the list names none, or too many. */
int emoji_open(const struct emoji_options *options, emoji_set **ret);
/* The next one in the order of emoji-test.txt: 1; 0 after the last. LG_ERR_CONFIG at the end: none, or one that was asked for
 * by a name that no emoji has. The picture is the set's. */
int emoji_next(emoji_set *set, const struct emoji **ret);
int emoji_without_glyph(const emoji_set *set);
/* Tolerates NULL. */
void emoji_close(emoji_set **set);
