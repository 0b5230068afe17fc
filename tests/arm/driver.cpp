// Calls functions of the kernels' library for another process: numbers in on stdin, out on stdout.
//
// A request: name, buffers, arguments, and pointers within buffers to set first. The answer: what the
// function returned, and the buffers as they are then. tests/arm/emulator.py is the other side.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace {

void* library = nullptr;

void need(bool fine, const char* what) {
    if (fine) return;
    fprintf(stderr, "driver: %s\n", what);
    exit(1);
}

void* function(const std::string& name) {
    void* found = dlsym(library, name.c_str());
    need(found, name.c_str());
    return found;
}

void take(void* to, size_t size) { need(fread(to, 1, size, stdin) == size, "the request ends early"); }
void give(const void* from, size_t size) { need(fwrite(from, 1, size, stdout) == size, "no reader"); }

int64_t number() {
    int64_t x;
    take(&x, 8);
    return x;
}

// Integers and pointers go in one row of registers and then on the stack, floats in another row: so
// one type of function fits all.
typedef int (*Any)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                   int64_t, int64_t, int64_t, float, float);

// Messages of rising size through one ring and back through another, by two threads. Returns how many
// bytes came back wrong.
int rings(int64_t messages) {
    constexpr int64_t CAPACITY = 4096, MOST = 9001, HEAD = 4096;
    struct Waiter {
        int64_t spin_ns, shy;
    };
    typedef int64_t (*Move)(char*, int64_t, char*, int64_t, char*, int64_t, int64_t, Waiter*, int64_t);
    const Move write = (Move)function("moonpool_ring_write"), read = (Move)function("moonpool_ring_read");
    const size_t size = 2 * (HEAD + CAPACITY);
    char* there = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char* back = there + HEAD + CAPACITY;
    const int64_t patience = 60000000000ll;
    auto length = [&](int64_t i) { return 1 + i * 617 % MOST; };
    std::thread echo([&] {
        Waiter waiter = {20000, 0};
        std::vector<char> body(MOST);
        for (int64_t i = 0; i < messages; ++i) {
            const int64_t n = length(i);
            read(there, CAPACITY, nullptr, 0, body.data(), n, 0, &waiter, patience);
            write(back, CAPACITY, nullptr, 0, body.data(), n, 0, &waiter, patience);
        }
    });
    Waiter waiter = {20000, 0};
    std::vector<char> sent(MOST), got(MOST);
    int wrong = 0;
    for (int64_t i = 0; i < messages; ++i) {
        const int64_t n = length(i);
        for (int64_t k = 0; k < n; ++k) sent[k] = (char)(i * 31 + k * 7);
        write(there, CAPACITY, nullptr, 0, sent.data(), n, 0, &waiter, patience);
        read(back, CAPACITY, nullptr, 0, got.data(), n, 0, &waiter, patience);
        for (int64_t k = 0; k < n; ++k) wrong += sent[k] != got[k];
    }
    echo.join();
    return wrong;
}

// Rounds of the all-gather of 3 ranks, a thread each. Returns how many pieces came out wrong.
int meetings(int64_t rounds) {
    constexpr int64_t RANKS = 3, BUFFER = 256, PIECE = 1000;
    typedef int64_t (*Size)(int64_t, int64_t);
    typedef int64_t (*Meet)(char*, int64_t, int64_t, int64_t, int64_t, const char*, char*, int64_t,
                            int64_t*, int64_t);
    const int64_t size = ((Size)function("moonpool_meeting_size"))(RANKS, BUFFER);
    const Meet meet = (Meet)function("moonpool_meet");
    char* memory = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int wrong[RANKS] = {};
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < RANKS; ++rank)
        ranks.emplace_back([&, rank] {
            int64_t waiter[2] = {20000, 0};
            std::vector<char> mine(PIECE), all(RANKS * PIECE);
            for (int64_t i = 0; i < rounds; ++i) {
                memset(mine.data(), (int)(i * 3 + rank), PIECE);
                if (meet(memory, BUFFER, rank, RANKS, RANKS, mine.data(), all.data(), PIECE, waiter,
                         60000000000ll))
                    ++wrong[rank];
                for (int64_t k = 0; k < RANKS * PIECE; ++k)
                    if (all[k] != (char)(i * 3 + k / PIECE)) ++wrong[rank];
            }
        });
    for (auto& rank : ranks) rank.join();
    return wrong[0] + wrong[1] + wrong[2];
}

int call(const std::string& name, const std::vector<int64_t>& given, const std::vector<float>& floats) {
    if (name == "rings") return rings(given[0]);
    if (name == "meetings") return meetings(given[0]);
    int64_t a[12] = {};
    float f[2] = {};
    need(given.size() <= 12 && floats.size() <= 2, "too many arguments");
    memcpy(a, given.data(), given.size() * 8);
    memcpy(f, floats.data(), floats.size() * 4);
    return ((Any)function(name))(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10],
                                 a[11], f[0], f[1]);
}

}  // namespace

int main(int, char** arguments) {
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fprintf(stderr, "driver: %s\n", dlerror());
    if (!library) return 1;
    const char* isa = ((const char* (*)())function("moonpool_isa"))();
    char text[16] = {};
    strncpy(text, isa, 15);
    give(text, 16);
    fflush(stdout);
    int64_t length;
    while (fread(&length, 1, 8, stdin) == 8) {
        std::string name(length, 0);
        take(&name[0], length);
        std::vector<std::vector<char>> buffers(number());
        for (auto& buffer : buffers) {
            buffer.resize(number() + 64);
            take(buffer.data(), buffer.size() - 64);
        }
        std::vector<int64_t> integers;
        std::vector<float> floats;
        for (int64_t left = number(); left; --left) {
            const int64_t kind = number(), value = number();
            float part;
            memcpy(&part, &value, 4);
            if (kind == 2) floats.push_back(part);
            else integers.push_back(kind == 1 ? (int64_t)buffers[value].data() : value);
        }
        for (int64_t left = number(); left; --left) {
            const int64_t in = number(), at = number(), to = number();
            char* pointer = buffers[to].data();
            memcpy(buffers[in].data() + at, &pointer, 8);
        }
        const int64_t result = call(name, integers, floats);
        give(&result, 8);
        for (auto& buffer : buffers) give(buffer.data(), buffer.size() - 64);
        fflush(stdout);
    }
    return 0;
}
