/* Fuzz target: a TOML document, as a file and as the value of an override. */
#include "config/toml.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>
#include <string.h>

static void check_item(const struct lg_toml_item *item)
{
    LG_ASSERT(item->key && item->key[0] && item->line >= 1 && item->column >= 1);
    LG_ASSERT((item->type == LG_TOML_TEXT) == (item->text != NULL));
    LG_ASSERT(item->type != LG_TOML_LIST || item->list);
    LG_ASSERT(item->type == LG_TOML_LIST || item->n_list == 0);
    for (int i = 0; i < item->n_list; i++) LG_ASSERT(strlen(item->list[i]) < LG_TOML_BYTES_MAX);
    LG_ASSERT((item->type == LG_TOML_TABLES) == (item->n_tables > 0));
    for (int i = 0; i < item->n_tables; i++)
        for (int k = 0; k < item->tables[i].n; k++) check_item(&item->tables[i].items[k]);
    LG_ASSERT(lg_toml_type_name(item->type)[0]);
}

LG_FUZZ_TARGET(toml)
{
    lg_toml *t = NULL;
    if (lg_toml_parse_file(lg_fuzz_file(0, data, bytes), &t) == 0) {
        for (int i = 0; i < t->n; i++) {
            check_item(&t->items[i]);
            LG_ASSERT(i == 0 || t->items[i - 1].line <= t->items[i].line);
        }
    } else {
        LG_ASSERT(!t && lg_err_message()[0]);
    }
    lg_toml_free(&t);
    lg_err_clear();
    struct lg_fuzz_input in = {data, bytes};
    char *text = lg_fuzz_text(&in);
    if (lg_toml_parse_value(text, &t) == 0) {
        LG_ASSERT(t->n == 1 && strcmp(t->items[0].key, "value") == 0);
        check_item(&t->items[0]);
    }
    lg_toml_free(&t);
    free(text);
}
