/* The only file that knows sentencepiece; see spiece.h.
 *
 * Every entry point catches everything: C callers cannot unwind. The model is read by ourselves,
 * looked through (tokenizer_check.h) and handed over as bytes, so that a missing file and a damaged
 * one get different messages and none ends the process. */
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <sentencepiece_processor.h>
#include <string>
#include <vector>
extern "C" {
#include "base/fs.h"
#include "stages/io/spiece.h"
#include "stages/io/spiece_json.h"
#include "stages/io/tokenizer_check.h"
}

struct lg_spiece {
    sentencepiece::SentencePieceProcessor processor;
    std::vector<int> ids; /* of the last caption: memory is kept */
    std::string path;
};

namespace
{
constexpr size_t model_bytes_max = size_t(64) << 20;

int load(lg_spiece *t, const char *path)
{
    char *data = nullptr;
    size_t bytes = 0;
    LG_TRY(lg_read_file(path, model_bytes_max, &data, &bytes));
    if (bytes && data[0] == '{') { /* no model begins so: there is no field 15 of type 3 */
        std::free(data);
        data = nullptr;
        LG_TRY(lg_spiece_json_read(path, &data, &bytes));
    }
    std::unique_ptr<char, decltype(&std::free)> owner(data, std::free); /* the library may throw */
    t->path = path;
    LG_TRY(lg_tokenizer_check(path, data, bytes));
    auto status = t->processor.LoadFromSerializedProto(absl::string_view(data, bytes));
    if (!status.ok())
        return LG_FAIL(LG_ERR_CORRUPT, "%s is not a complete sentencepiece model (%s)", path,
                       status.ToString().c_str());
    if (t->processor.eos_id() != LG_SPIECE_EOS || t->processor.pad_id() != LG_SPIECE_PAD)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s: its end is id %d and its padding %d; T5's are %d and %d: it belongs to "
                       "another kind of model",
                       path, t->processor.eos_id(), t->processor.pad_id(), LG_SPIECE_EOS,
                       LG_SPIECE_PAD);
    return 0;
}
} // namespace

extern "C" {

int lg_spiece_open(const char *path, lg_spiece **ret)
{
    lg_spiece *t = new (std::nothrow) lg_spiece;
    if (!t) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the tokenizer %s", path);
    int rc;
    try {
        LG_TRY_GOTO(rc, load(t, path), fail);
    } catch (const std::exception &e) {
        rc = LG_FAIL(LG_ERR_CORRUPT, "%s: %s", path, e.what());
        goto fail;
    }
    *ret = t;
    return 0;
fail:
    delete t;
    return rc;
}

void lg_spiece_close(lg_spiece **t)
{
    delete *t;
    *t = nullptr;
}

int lg_spiece_pieces(const lg_spiece *t)
{
    return t->processor.GetPieceSize();
}

int lg_spiece_encode(lg_spiece *t, const char *text, int length, int32_t *ret_ids, int *ret_length)
{
    LG_ASSERT(length >= 1);
    try {
        auto status = t->processor.Encode(absl::string_view(text, std::strlen(text)), &t->ids);
        if (!status.ok())
            return LG_FAIL(LG_ERR_FAILED, "%s: cannot tokenize \"%.80s\": %s", t->path.c_str(),
                           text, status.ToString().c_str());
    } catch (const std::exception &e) {
        return LG_FAIL(LG_ERR_FAILED, "%s: cannot tokenize \"%.80s\": %s", t->path.c_str(), text,
                       e.what());
    }
    int n = LG_MIN((int)t->ids.size(), length - 1);
    for (int i = 0; i < length; i++)
        ret_ids[i] = i < n ? t->ids[(size_t)i] : i == n ? LG_SPIECE_EOS : LG_SPIECE_PAD;
    *ret_length = n + 1;
    return 0;
}
}
