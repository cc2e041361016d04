// Fingerprints of memory, and KV rows between slots and blocks.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>

#include <sys/uio.h>
#include <unistd.h>

constexpr int64_t STRIPE_WORDS = 512;
constexpr int64_t STRIPE = STRIPE_WORDS * 8;  // bytes

// The high half goes into the low one first: a difference in a word's top bit would else reach only the product's top bit,
// and two of them would cancel. Both steps lose nothing, so one changed word always changes the sum.
static inline uint64_t mixed(uint64_t word, uint64_t constant) { return (word ^ (word >> 32)) * constant; }

// The sum of one stripe of at most STRIPE bytes; what is missing to whole words counts as zeros.
static inline uint64_t stripe_sum(const char* bytes, int64_t size, const uint64_t* constants) {
    uint64_t total = 0;
    const int64_t whole = size / 8;
    for (int64_t i = 0; i < whole; i++) {
        uint64_t word;
        memcpy(&word, bytes + i * 8, 8);
        total += mixed(word, constants[i]);
    }
    if (whole * 8 < size) {
        uint64_t word = 0;
        memcpy(&word, bytes + whole * 8, size - whole * 8);
        total += mixed(word, constants[whole]);
    }
    return total;
}

static inline int64_t stripes(int64_t size) { return (size + STRIPE - 1) / STRIPE; }

static inline void stripe_sums(const char* bytes, int64_t size, const uint64_t* constants, uint64_t* sums) {
    for (int64_t s = 0; s < stripes(size); s++)
        sums[s] = stripe_sum(bytes + s * STRIPE, std::min(STRIPE, size - s * STRIPE), constants);
}

// Rows that lie in a slot or in a block: `planes` planes, rows one after the other in each.
struct Rows {
    char* base;
    int64_t planes, plane_stride, row_bytes;  // bytes
};

// Blocks to be copied into one slot, or out of it. A block is flat: for each buffer [planes][rows][row_bytes]. It lies at
// addresses [block][buffer], or in a file at an offset.
struct BlockCopy {
    int64_t blocks, buffers;
    const int64_t* addresses;
    const int32_t* files;    // [blocks], -1 for one in memory
    const int64_t* offsets;  // [blocks]
    const int64_t* stored;   // [blocks] rows that the block holds
    const int64_t* taken;    // [blocks] leading rows to copy
    const int64_t* first;    // [blocks] row of the slot that the first one is
    const Rows* slot;        // [buffers]
    const int64_t* sums_at;  // [blocks] where its sums start, -1 for none
    uint64_t* sums;
    const uint64_t* constants;
    int32_t* status;  // [blocks] 0, or the error number of the read
    int32_t nowait;   // files: only what is in memory already
};

static inline int read_whole(int file, char* to, int64_t size, int64_t offset, bool nowait) {
    while (size > 0) {
        struct iovec part = {to, (size_t)size};
#if defined(RWF_NOWAIT)
        const ssize_t got = preadv2(file, &part, 1, offset, nowait ? RWF_NOWAIT : 0);
#else
        const ssize_t got = nowait ? (errno = EOPNOTSUPP, -1) : preadv(file, &part, 1, offset);
#endif
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return ENODATA;  // the file ends too early
        to += got, size -= got, offset += got;
    }
    return 0;
}

// One block into the slot. Its sums are taken of the bytes that are copied, while they are in the cache.
static inline void load_block(const BlockCopy& c, int64_t block, std::vector<char>& space) {
    int64_t size = 0;
    for (int64_t b = 0; b < c.buffers; b++) size += c.slot[b].planes * c.slot[b].row_bytes * c.stored[block];
    const char* flat = nullptr;
    if (c.files[block] >= 0) {
        if ((int64_t)space.size() < size) space.resize(size);
        c.status[block] = read_whole(c.files[block], space.data(), size, c.offsets[block], c.nowait);
        if (c.status[block]) return;
        flat = space.data();
    }
    // A flat block's buffers follow one another, so its sums go over all of it.
    if (c.sums_at[block] >= 0)
        stripe_sums(
            flat ? flat : (const char*)c.addresses[block * c.buffers], size, c.constants, c.sums + c.sums_at[block]
        );
    for (int64_t b = 0; b < c.buffers; b++) {
        const Rows& to = c.slot[b];
        const char* from = flat ? flat : (const char*)c.addresses[block * c.buffers + b];
        const int64_t plane = c.stored[block] * to.row_bytes;
        char* target = to.base + c.first[block] * to.row_bytes;
        for (int64_t p = 0; p < to.planes; p++)
            memcpy(target + p * to.plane_stride, from + p * plane, c.taken[block] * to.row_bytes);
        if (flat) flat += to.planes * plane;
    }
}

// One block out of rows into flat memory at addresses[block][0]; its sums are those of what was written.
static inline void store_block(const BlockCopy& c, int64_t block) {
    char* flat = (char*)c.addresses[block];
    const Rows* rows = c.slot + block * c.buffers;
    for (int64_t b = 0; b < c.buffers; b++) {
        const int64_t plane = c.taken[block] * rows[b].row_bytes;
        for (int64_t p = 0; p < rows[b].planes; p++, flat += plane)
            memcpy(flat, rows[b].base + p * rows[b].plane_stride, plane);
    }
    const char* start = (const char*)c.addresses[block];
    stripe_sums(start, flat - start, c.constants, c.sums + c.sums_at[block]);
}
