/* `lgsup status --json` of several hosts, held against docs/status.schema.json: of all, of one, and of hosts that are silent
 * or answer something else. Machines are addresses of the loopback interface, other ones in each process, so that the
 * programs of several builds may run at once; the command is a process of its own on the first, others answer
 * for the other machines as their lgsups do. */
#include "base/clock.h"
#include "base/utf8.h"
#include "supervisor/commands/answerer.h"
#include "supervisor/hosts/keys.h"
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include "tests/unit/status_schema.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { PORT = 17831, SILENCE_MS = 600, MACHINES = 3, HOSTS = 2, TURN_MS = 2 };

static char g_address[LG_PLACES_MAX][LG_HOST_ADDRESS_BYTES];
static lg_run g_run;
static lg_board *g_board;
static char g_dir[LG_PATH_BYTES], g_key[SCRATCH_BYTES + 8];

/* The lgsup of a machine, as far as it answers: a process of its own, since a command is forked from here, beside whose
 * threads no fork is safe. 0: there is none. */
static pid_t g_machine[MACHINES];

typedef int answer_f(void *context, const struct lg_question *q, struct lg_reply *ret);

/* Writes a byte to `ready` when it can be asked. */
static int serve(int place, uint64_t lineage, answer_f *answer, int ready)
{
    struct lg_channel_spec spec = {.place = place,
                                   .places = MACHINES,
                                   .port = PORT,
                                   .address = g_address,
                                   .silence_ms = SILENCE_MS};
    const struct lg_answer own = {.place = place,
                                  .host = place < HOSTS ? place : -1,
                                  .phase = place < HOSTS ? LG_GROUP_member : LG_GROUP_joining};
    struct lg_answerer answerer;
    lg_channel *channel;
    lg_answers *answers;
    unsigned char *message = malloc(LG_CHANNEL_BYTES);
    LG_ASSERT(message);
    LG_TRY(lg_answerer_make(g_dir, &answerer));
    LG_TRY(lg_cluster_key_load(g_key, &spec.key));
    LG_TRY(lg_channel_open(&spec, &channel));
    LG_TRY(lg_answers_open(
        &(struct lg_answers_spec){
            {answer ? answer : answerer.answer, answerer.context}, lineage, -1},
        &answers));
    if (write(ready, "", 1) != 1) return LG_FAIL(LG_ERR_IO, "nobody waits for machine %d", place);
    for (;;) { /* until it is killed */
        lg_channel_wait(channel, -1, TURN_MS);
        for (size_t n; (n = lg_channel_receive(channel, message, LG_CHANNEL_BYTES)) > 0;)
            lg_answers_hear(answers, channel, &own, message, n);
        lg_answers_turn(answers, channel, &own, lg_now_ns());
    }
}

/* Machine `place` answers from here on, by `answer`, or as lgsup does where that is NULL. The last one is a spare. */
static void begin(int place, uint64_t lineage, answer_f *answer)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    g_machine[place] = fork();
    assert_true(g_machine[place] >= 0);
    if (g_machine[place] == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(place, lineage, answer, ready[1]);
        fprintf(stderr, "machine %d: %s\n", place, lg_err_message());
        _exit(1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
}

static void end(pid_t *machine)
{
    if (*machine <= 0) return;
    kill(*machine, SIGKILL);
    waitpid(*machine, NULL, 0);
    *machine = 0;
}

static void choose_addresses(void)
{
    const unsigned p = (unsigned)getpid(); /* 22 bits */
    static_assert(MACHINES < 4, "two bits");
    for (unsigned i = 0; i < MACHINES; i++)
        snprintf(g_address[i], sizeof g_address[i], "127.%u.%u.%u", p >> 14 & 255, p >> 6 & 255,
                 (p & 63) << 2 | (i + 1));
}

static int setup(void **state)
{
    char hosts[1024];
    choose_addresses();
    struct lg_hosts_record epoch = {.formation = 1, .number = 1, .members = 3, .leader = 0};
    epoch.member[1].place = 1;
    command_setup(state);
    snprintf(g_key, sizeof g_key, "%s", scratch_path("key"));
    assert_int_equal(lg_cluster_key_make(g_key), 0);
    snprintf(
        hosts, sizeof hosts,
        "micro_batch_size = 4\n[hosts]\ncount = 2\nspare = 1\nnumber = 0\nport = %d\nkey = \"%s\"\n"
        "silence_ms = %d\nlist = [\"%s\", \"%s\", \"%s\"]\n",
        PORT, g_key, SILENCE_MS, g_address[0], g_address[1], g_address[2]);
    command_run(command_pipeline(hosts), &g_run, &g_board);
    snprintf(g_dir, sizeof g_dir, "%s", g_run.dir);
    lg_hosts_enter(g_board, &epoch);
    atomic_store(&g_board->s->run_state, LG_RUN_RUNNING);
    shm_fixture_join(g_board, LG_ROLE_vae, 0);
    shm_fixture_join(g_board, LG_ROLE_exchange, 0);
    return 0;
}

static int teardown(void **state)
{
    for (int i = 0; i < MACHINES; i++) end(&g_machine[i]);
    lg_board_close(&g_board);
    lg_run_close(&g_run);
    return command_teardown(state);
}

/* What `lgsup status --json` prints, which follows the schema; host NULL: of all. The caller deletes it. */
static cJSON *status(const char *host)
{
    if (host)
        EXPECT(0, "", "status", "--json", "--host", host, g_dir);
    else
        EXPECT(0, "", "status", "--json", g_dir);
    const char *text = strchr(command_said(), '{'); /* after what it says on stderr */
    cJSON *j =
        text && lg_utf8_valid(text, strlen(text)) ? cJSON_ParseWithOpts(text, NULL, true) : NULL;
    if (!j || !status_follows_schema(j)) {
        fputs(command_said(), stderr);
        fail();
    }
    return j;
}

static const cJSON *get(const cJSON *j, const char *field)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, field);
    assert_non_null(v);
    return v;
}

static const cJSON *machine_of(const cJSON *all, int place)
{
    assert_int_equal(cJSON_GetArraySize(get(all, "hosts")), MACHINES);
    const cJSON *m = cJSON_GetArrayItem(get(all, "hosts"), place);
    assert_true(get(m, "place")->valuedouble == place);
    assert_string_equal(get(m, "address")->valuestring, g_address[place]);
    assert_int_equal(cJSON_IsTrue(get(m, "this")), place == 0);
    return m;
}

/* There is no status, and why. */
static void expect_none(const cJSON *m, bool has_answered, const char *why)
{
    assert_int_equal(cJSON_IsTrue(get(m, "answers")), has_answered);
    assert_true(cJSON_IsNull(get(m, "status")));
    if (!strstr(get(m, "why")->valuestring, why) || !get(m, "why")->valuestring[0])
        fail_msg("\"%s\" instead of \"%s\"", get(m, "why")->valuestring, why);
}

static void expect_some(const cJSON *m, int host)
{
    assert_true(cJSON_IsTrue(get(m, "answers")));
    assert_true(get(m, "host")->valuedouble == host);
    assert_int_equal(cJSON_IsTrue(get(m, "leads")), host == 0);
    assert_string_equal(get(m, "why")->valuestring, "");
    assert_int_equal(cJSON_GetArraySize(get(get(m, "status"), "instances")), 2);
}

static void test_all(void **state)
{
    (void)state;
    for (int i = 1; i < MACHINES; i++) begin(i, g_run.lineage, NULL);
    atomic_store(&g_board->s->hosts.heard_ns[1], lg_now_ns());
    cJSON *all = status(NULL);
    assert_string_equal(get(all, "state")->valuestring, "running");
    expect_some(machine_of(all, 0), 0);
    expect_some(machine_of(all, 1), 1);
    assert_true(cJSON_IsNull(get(machine_of(all, 0), "silent_s")));
    assert_true(cJSON_IsNumber(get(machine_of(all, 1), "silent_s")));
    expect_none(machine_of(all, 2), true, "waits to take the number");
    assert_true(cJSON_IsNull(get(machine_of(all, 2), "host")));
    status_schema_is_strict(all);
    cJSON_AddArrayToObject(cJSON_GetObjectItem(cJSON_GetArrayItem(get(all, "hosts"), 1), "status"),
                           "hosts"); /* which that one's own status does not have here */
    assert_false(status_follows_schema(all));
    cJSON_Delete(all);
}

static void test_one(void **state)
{
    (void)state;
    begin(1, g_run.lineage, NULL);
    for (int h = 0; h < 2; h++) {
        cJSON *one = status(h ? "1" : "0");
        assert_false(cJSON_HasObjectItem(one, "hosts"));
        assert_int_equal(cJSON_GetArraySize(get(one, "instances")), 2);
        status_schema_is_strict(one);
        cJSON_Delete(one);
    }
}

/* As lgsup names it, with what follows. */
static const char *host_1(const char *text)
{
    static char named[256];
    snprintf(named, sizeof named, "host 1 (%s)%s", g_address[1], text);
    return named;
}

/* One was heard once, the other never. */
static void test_silent(void **state)
{
    (void)state;
    atomic_store(&g_board->s->hosts.heard_ns[1], lg_now_ns() - 5 * LG_S_NS);
    cJSON *all = status(NULL);
    expect_some(machine_of(all, 0), 0);
    expect_none(machine_of(all, 1), false, "does not answer; silent for ");
    assert_true(get(machine_of(all, 1), "silent_s")->valuedouble >= 5);
    assert_true(get(machine_of(all, 1), "host")->valuedouble == 1);
    expect_none(machine_of(all, 2), false, "does not answer");
    assert_true(cJSON_IsNull(get(machine_of(all, 2), "silent_s")));
    status_schema_is_strict(all);
    cJSON_Delete(all);
    EXPECT(9, host_1(" does not answer; silent for "), "status", "--json", "--host", "1", g_dir);
    command_never("{");
}

static int answer_half(void *context, const struct lg_question *q, struct lg_reply *ret)
{
    (void)context;
    (void)q;
    ret->text = strdup("{\"format\": 1, ");
    LG_ASSERT(ret->text);
    ret->bytes = strlen(ret->text);
    return 0;
}

/* An answer that is no status of this run. */
static void test_other_answers(void **state)
{
    (void)state;
    begin(1, g_run.lineage, answer_half);
    begin(2, g_run.lineage + 1, NULL);
    cJSON *all = status(NULL);
    expect_none(machine_of(all, 1), true, "its status is not JSON: ");
    expect_none(machine_of(all, 2), true, "another run is there");
    status_schema_is_strict(all);
    cJSON_Delete(all);
    EXPECT(5, host_1(": its status is not JSON: "), "status", "--json", "--host", "1", g_dir);
    command_never("{");
}

/* Nobody can be asked: this host alone. */
static void test_without_the_key(void **state)
{
    (void)state;
    assert_int_equal(chmod(g_key, 0644), 0);
    cJSON *own = status(NULL);
    command_also("only this host is shown");
    assert_false(cJSON_HasObjectItem(own, "hosts"));
    cJSON_Delete(own);
}

/* A text may hold bytes that are not UTF-8, as where a longer one was cut; JSON may not. */
static void test_a_text_that_was_cut(void **state)
{
    (void)state;
    for (int i = 1; i < MACHINES; i++) begin(i, g_run.lineage, NULL);
    snprintf(g_board->s->cause, sizeof g_board->s->cause, "no \"Gem\xc3\xa4lde\" in the fold\xc3");
    cJSON *all = status(NULL);
    expect_some(machine_of(all, 1), 1);
    const cJSON *other = get(machine_of(all, 1), "status");
    assert_string_equal(get(all, "cause")->valuestring, "no \"Gem\xc3\xa4lde\" in the fold\\xc3");
    assert_string_equal(get(other, "cause")->valuestring, get(all, "cause")->valuestring);
    cJSON_Delete(all);
}

static int answer_at_length(void *context, const struct lg_question *q, struct lg_reply *ret)
{
    char text[800 + 1] = "";
    (void)context;
    (void)q;
    (void)ret;
    for (int i = 0; i < 800; i += 2) memcpy(text + i, "\xc3\xa4", 2);
    return LG_FAIL(LG_ERR_IO, "%s", text);
}

/* The same of why there is no status. */
static void test_a_reason_that_was_cut(void **state)
{
    (void)state;
    for (int i = 1; i < MACHINES; i++) begin(i, g_run.lineage, answer_at_length);
    cJSON *all = status(NULL);
    expect_none(machine_of(all, 1), true, "\xc3\xa4\\xc3");
    cJSON_Delete(all);
}

static void test_roles(void **state)
{
    (void)state;
    status_schema_has_roles();
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {T(test_all),
                                       T(test_one),
                                       T(test_silent),
                                       T(test_other_answers),
                                       T(test_without_the_key),
                                       T(test_a_text_that_was_cut),
                                       T(test_a_reason_that_was_cut),
                                       cmocka_unit_test(test_roles)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
