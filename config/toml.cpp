/* The only file that knows toml++.
 *
 * Every entry point catches everything: C callers cannot unwind. A half-built list is freed by
 * lg_toml_free, which accepts one. toml++ bounds the nesting of a document itself (256). */
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <toml++/toml.h>
#include <vector>
extern "C" {
#include "base/fs.h"
#include "config/toml.h"
}

namespace
{
char *copy(std::string_view s)
{
    auto *p = static_cast<char *>(std::malloc(s.size() + 1));
    if (!p) throw std::bad_alloc();
    std::memcpy(p, s.data(), s.size());
    p[s.size()] = 0;
    return p;
}

bool has_nul(std::string_view s)
{
    return s.find('\0') != s.npos;
}

void release(lg_toml_item &item)
{
    std::free(item.key);
    std::free(item.text);
    for (int i = 0; i < item.n_list; i++) std::free(item.list[i]);
    std::free(item.list);
}

/* Owns its items until they are handed over. */
struct Items {
    std::vector<lg_toml_item> v;
    ~Items()
    {
        for (auto &item : v) release(item);
    }
};

void set_list(lg_toml_item &item, const toml::array &array)
{
    item.type = LG_TOML_OTHER;
    for (auto &element : array)
        if (!element.is_string() || has_nul(**element.as_string())) return;
    item.type = LG_TOML_LIST;
    item.list = static_cast<char **>(std::calloc(array.size() + 1, sizeof *item.list));
    if (!item.list) throw std::bad_alloc();
    for (auto &element : array) {
        item.list[item.n_list] = copy(**element.as_string());
        item.n_list++;
    }
}

void set_value(lg_toml_item &item, const toml::node &node)
{
    item.type = LG_TOML_OTHER;
    if (auto *s = node.as_string()) {
        if (has_nul(**s)) return;
        item.text = copy(**s);
        item.type = LG_TOML_TEXT;
    } else if (auto *i = node.as_integer()) {
        item.i = **i;
        item.type = LG_TOML_INT;
    } else if (auto *d = node.as_floating_point()) {
        item.d = **d;
        item.type = LG_TOML_NUM;
    } else if (auto *b = node.as_boolean()) {
        item.b = **b;
        item.type = LG_TOML_BOOL;
    } else if (auto *a = node.as_array()) {
        set_list(item, *a);
    } else if (node.is_table()) {
        item.type = LG_TOML_TABLE;
    }
}

void flatten(const toml::table &table, const std::string &prefix, Items &items)
{
    for (auto &&[k, node] : table) {
        std::string part(k.str());
        if (part.empty() || has_nul(part) || part.find('.') != part.npos) part = '"' + part + '"';
        std::replace(part.begin(), part.end(), '\0', '?');
        std::string key = prefix + part;
        items.v.push_back(lg_toml_item{});
        auto &item = items.v.back();
        item.key = copy(key);
        item.line = static_cast<int>(k.source().begin.line);
        item.column = static_cast<int>(k.source().begin.column);
        set_value(item, node);
        if (auto *t = node.as_table()) flatten(*t, key + ".", items);
    }
}

/* Throws toml::parse_error. */
lg_toml *parse(std::string_view text)
{
    toml::table root = toml::parse(text);
    Items items;
    flatten(root, "", items);
    /* toml++ sorts by name. A table made only by dotted keys has its first key's place. */
    std::stable_sort(items.v.begin(), items.v.end(),
                     [](const lg_toml_item &a, const lg_toml_item &b) {
                         return a.line != b.line ? a.line < b.line : a.column < b.column;
                     });
    auto *t = static_cast<lg_toml *>(std::calloc(1, sizeof(lg_toml)));
    if (!t) throw std::bad_alloc();
    t->items = static_cast<lg_toml_item *>(std::calloc(items.v.size() + 1, sizeof(lg_toml_item)));
    if (!t->items) {
        std::free(t);
        throw std::bad_alloc();
    }
    t->n = static_cast<int>(items.v.size());
    std::copy(items.v.begin(), items.v.end(), t->items);
    items.v.clear();
    return t;
}

int parse_guarded(const char *where, std::string_view text, lg_toml **ret)
{
    try {
        *ret = parse(text);
        return 0;
    } catch (const toml::parse_error &e) {
        auto at = e.source().begin;
        return LG_FAIL(LG_ERR_CONFIG, "%s:%u:%u: %.300s", where, static_cast<unsigned>(at.line),
                       static_cast<unsigned>(at.column), std::string(e.description()).c_str());
    } catch (const std::bad_alloc &) {
        return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", where);
    } catch (const std::exception &e) {
        return LG_FAIL(LG_ERR_CONFIG, "%s: %.300s", where, e.what());
    } catch (...) {
        return LG_FAIL(LG_ERR_CONFIG, "%s: cannot be read as TOML", where);
    }
}
} // namespace

extern "C" int lg_toml_parse_file(const char *path, lg_toml **ret)
{
    char *data = nullptr;
    size_t bytes = 0;
    LG_TRY(lg_read_file(path, LG_TOML_BYTES_MAX, &data, &bytes));
    int rc = parse_guarded(path, std::string_view(data, bytes), ret);
    std::free(data);
    LG_TRY(rc);
    return 0;
}

extern "C" int lg_toml_parse_value(const char *text, lg_toml **ret)
{
    size_t bytes = std::strlen(text);
    if (bytes > LG_TOML_BYTES_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "a value of %zu bytes is too long", bytes);
    std::string line;
    try {
        line = std::string("value = ") + text;
    } catch (...) {
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a value of %zu bytes", bytes);
    }
    lg_toml *t = nullptr;
    LG_TRY(parse_guarded("value", line, &t));
    if (t->n != 1) { /* text went on with keys of its own */
        lg_toml_free(&t);
        return LG_FAIL(LG_ERR_CONFIG, "expected one value, got \"%.60s\"", text);
    }
    *ret = t;
    return 0;
}

extern "C" void lg_toml_free(lg_toml **t)
{
    if (!t || !*t) return;
    for (int i = 0; i < (*t)->n; i++) release((*t)->items[i]);
    std::free((*t)->items);
    std::free(*t);
    *t = nullptr;
}

extern "C" const char *lg_toml_type_name(lg_toml_type type)
{
    static const char *const names[] = {"a text",
                                        "a whole number",
                                        "a number with a fraction",
                                        "true/false",
                                        "a list of texts",
                                        "a table",
                                        "a date, or a list of something else than texts"};
    return names[type];
}
