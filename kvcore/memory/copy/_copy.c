/* Copies of KV units between two strided layouts in host memory.
 *
 * A unit is `tokens` consecutive tokens of one page. The copy is a sequence of steps: one head of
 * one plane (K or V of one layer), for a run of units. A step moves tiles of tokens x dim elements:
 *
 *   rows        both sides keep a token's dims together: runs of bytes
 *   to rows     the source keeps tokens together (column-major K), the destination keeps dims
 *               together: a transpose
 *   to columns  the reverse
 *   elements    anything else, one by one
 *
 * Order:  layer > run of units > piece of their tokens > head > k/v.  K and V that are adjacent are
 * therefore read while both are in the cache. So are all heads of a token if a page keeps them
 * together: a piece is then a few tokens, otherwise the whole unit. Slots and pages come in any
 * order, which no hardware prefetcher follows. A scout therefore walks the same steps, some KiB
 * ahead, and prefetches. Large copies write whole cache lines around the cache (streaming stores),
 * because the destination is not read soon, and a normal store would first read the line it
 * overwrites.
 *
 * C11 with GNU attributes, no Python. build_native.py compiles it.
 */
#include <stdint.h>
#include <string.h>

#ifndef KVCORE_SIMD
/* The most: 0 none, 1 SSE2, 2 AVX2, 3 AVX-512 (2 and 3 if the CPU has them). Tests set it. */
#define KVCORE_SIMD 3
#endif

#if defined(__SSE2__) && KVCORE_SIMD >= 1
#include <immintrin.h>
#define HAVE_SSE2 1
#define AVX2 __attribute__((target("avx2")))
#else
#define HAVE_SSE2 0
#endif

#define ABI 3
#define SUM_KEY 0x9E3779B97F4A7C15u
#define SUM_FIRST 0xBF58476D1CE4E5B9u
#define SUM_SECOND 0x94D049BB133111EBu
#define LINE 64
#define TILE_BYTES (16 * 1024)   /* of a transpose: half of an L1 cache of 32 KiB */
#define PIECE_BYTES (16 * 1024)  /* of all heads of some tokens, where pages keep them together */
#define AHEAD_BYTES (48 * 1024)  /* from the scout to the worker. Also the most that a run in
                                    columns holds: the scout leaves it before the worker enters */
#define CHUNK_BYTES 512          /* copied between two calls of look_ahead */

_Static_assert(sizeof(void *) == 8, "the caller passes addresses as int64");

typedef struct {
    char *base;              /* address of element (page 0, head 0, token 0, dim 0) */
    int64_t page, head;      /* strides in elements, like all below */
    int64_t token, token_inner, token_inner_stride;
    int64_t dim, dim_inner, dim_inner_stride;
    int64_t head_dim;
} plane_t;

typedef struct {
    const plane_t *src, *dst;                /* [layers][kv_factor] */
    int64_t layers, kv_factor;
    const int64_t *src_units, *dst_units;    /* negative: skipped */
    int64_t units, tokens, src_per_page, dst_per_page, heads, size;
    int64_t stream;                          /* 1: write around the cache */
} request_t;

typedef enum { ROWS, TO_ROWS, TO_COLUMNS, ELEMENTS } kind_t;

typedef struct {
    request_t r;
    const int64_t *side_units;   /* the units of a run are adjacent on this side */
    int64_t side_per_page, run_units, piece;
    int avx2;
} job_t;

/* A step: tokens [first, first + piece) of units [unit, unit + run), one head of one plane. */
typedef struct {
    int64_t layer, unit, run, first, head, kv;
} step_t;

static inline int64_t at(int64_t i, int64_t stride, int64_t inner, int64_t inner_stride) {
    return inner == 1 ? i * stride : i / inner * stride + i % inner * inner_stride;
}
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int plain(const plane_t *p) { return p->token_inner == 1 && p->dim_inner == 1; }
static int in_rows(const plane_t *p) { return plain(p) && p->dim == 1; }
static int in_columns(const plane_t *p) { return plain(p) && p->token == 1 && p->dim != 1; }
static int token_major(const plane_t *p) { return in_rows(p) && p->token > p->head; }

/* Returns 1 if a token's K and V are adjacent in plane i's layer. */
static int kv_together(const request_t *r, const plane_t *planes, int64_t i) {
    const plane_t *p = planes + i / r->kv_factor * r->kv_factor;
    if (r->kv_factor != 2 || !in_rows(p) || !in_rows(p + 1)) return 0;
    int64_t apart = (p[1].base - p[0].base) / r->size;
    return -p->token < apart && apart < p->token;
}

static kind_t kind_of(const plane_t *sp, const plane_t *dp, int64_t size) {
    if (in_rows(sp) && in_rows(dp)) return ROWS;
    if ((size != 2 && size != 4) || sp->head_dim * LINE > TILE_BYTES) return ELEMENTS;
    if (in_columns(sp) && in_rows(dp)) return TO_ROWS;
    if (in_rows(sp) && in_columns(dp)) return TO_COLUMNS;
    return ELEMENTS;
}

/* ---- steps ---- */

static const plane_t *src_plane(const job_t *j, const step_t *s) {
    return j->r.src + s->layer * j->r.kv_factor + s->kv;
}
static const plane_t *dst_plane(const job_t *j, const step_t *s) {
    return j->r.dst + s->layer * j->r.kv_factor + s->kv;
}
static int64_t step_tokens(const job_t *j, const step_t *s) {
    return least(j->piece, j->r.tokens - s->first);
}
static int left_out(const job_t *j, int64_t i) {
    return j->r.src_units[i] < 0 || j->r.dst_units[i] < 0;
}

/* Moves `s` to the first run at or after s->unit. Returns 0 if there is none. */
static int find_run(const job_t *j, step_t *s) {
    while (s->unit < j->r.units && left_out(j, s->unit)) s->unit++;
    if (s->unit == j->r.units) return 0;
    const int64_t *side = j->side_units + s->unit;
    int64_t most = least(j->run_units, j->r.units - s->unit);
    most = least(most, j->side_per_page - side[0] % j->side_per_page);
    for (s->run = 1; s->run < most; s->run++)
        if (left_out(j, s->unit + s->run) || side[s->run] != side[0] + s->run) break;
    return 1;
}

static int next_step(const job_t *j, step_t *s) {
    if (++s->kv < j->r.kv_factor) return 1;
    s->kv = 0;
    if (++s->head < j->r.heads) return 1;
    s->head = 0;
    s->first += j->piece;
    if (s->first < j->r.tokens) return 1;
    s->first = 0;
    s->unit += s->run;
    if (find_run(j, s)) return 1;
    s->unit = 0;
    return ++s->layer < j->r.layers && find_run(j, s);
}

/* Address of a step's first element in `unit`. For plain planes only. */
static char *tile_at(const plane_t *p, int64_t unit, int64_t per_page, const job_t *j,
                     const step_t *s) {
    int64_t token = unit % per_page * j->r.tokens + s->first;
    return p->base + (unit / per_page * p->page + s->head * p->head + token * p->token) * j->r.size;
}
static const char *src_tile(const job_t *j, const step_t *s, int64_t k) {
    return tile_at(src_plane(j, s), j->r.src_units[s->unit + k], j->r.src_per_page, j, s);
}
static char *dst_tile(const job_t *j, const step_t *s, int64_t k) {
    return tile_at(dst_plane(j, s), j->r.dst_units[s->unit + k], j->r.dst_per_page, j, s);
}

/* ---- the scout ----
 *
 * It prefetches to the L2 only, and between writes only. Measured on AMD EPYC (Zen 3), pieces of
 * 4 KiB in random order, memcpy = 1: no prefetch 0.55, to the L1 0.6, to the L2 0.9; in bursts of
 * 64 lines instead of 8, 0.7. If the source is packed the prefetches are useless, but harmless.
 */

/* Walks the source of all steps, row by row. */
typedef struct {
    const job_t *j;
    step_t step;
    int alive;
    int64_t credit;                               /* bytes it may still prefetch */
    int64_t tiles, tile, rows, row;               /* of the step, and where it is in it */
    int64_t stride, bytes;                        /* of a row */
    const char *base;                             /* of the tile */
} scout_t;

static void scout_step(scout_t *c) {
    const plane_t *p = src_plane(c->j, &c->step);
    int64_t tokens = step_tokens(c->j, &c->step), size = c->j->r.size;
    int columns = in_columns(p), together = columns && c->j->side_units == c->j->r.src_units;
    c->tiles = together ? 1 : c->step.run;
    c->rows = columns ? p->head_dim : tokens;
    c->stride = (columns ? p->dim : p->token) * size;
    c->bytes = (columns ? tokens * (c->step.run / c->tiles) : p->head_dim) * size;
    c->tile = c->row = 0;
    c->base = src_tile(c->j, &c->step, 0);
}

static void scout_tile(scout_t *c) {
    c->row = 0;
    if (++c->tile < c->tiles) {
        c->base = src_tile(c->j, &c->step, c->tile);
        return;
    }
    c->alive = next_step(c->j, &c->step);
    if (c->alive) scout_step(c);
}

/* Prefetches as many bytes to the L2 as the worker has just copied. */
static void look_ahead(scout_t *c, int64_t bytes) {
    c->credit += bytes;
    while (c->credit > 0 && c->alive) {
        const char *row = c->base + c->row * c->stride;
        int64_t n = least(c->rows - c->row, (c->credit + c->bytes - 1) / c->bytes);
        for (int64_t r = 0; r < n; r++, row += c->stride)
            for (int64_t i = 0; i < c->bytes; i += LINE) __builtin_prefetch(row + i, 0, 2);
        c->credit -= n * c->bytes;
        c->row += n;
        if (c->row == c->rows) scout_tile(c);
    }
}

/* ---- moving ---- */

/* Writes whole lines, around the cache if the CPU can. */
static inline void stream_lines(char *dst, const char *src, int64_t n) {
#if HAVE_SSE2
    for (int64_t i = 0; i < n; i += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(src + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(src + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(src + i + 48));
        _mm_stream_si128((__m128i *)(dst + i), a);
        _mm_stream_si128((__m128i *)(dst + i + 16), b);
        _mm_stream_si128((__m128i *)(dst + i + 32), c);
        _mm_stream_si128((__m128i *)(dst + i + 48), d);
    }
#else
    memcpy(dst, src, (size_t)n);
#endif
}

/* Copies n bytes. With `stream`, the whole lines of the destination go around the cache. */
static void put(char *dst, const char *src, int64_t n, int64_t stream) {
    int64_t before = -(uintptr_t)dst & (LINE - 1), lines = (n - before) / LINE * LINE;
    if (!stream || lines <= 0) {
        memcpy(dst, src, (size_t)n);
        return;
    }
    memcpy(dst, src, (size_t)before);
    stream_lines(dst + before, src + before, lines);
    memcpy(dst + before + lines, src + before + lines, (size_t)(n - before - lines));
}

/* Copies rows of n bytes, `ds` and `ss` bytes apart, while the scout looks ahead. */
static void put_rows(char *dst, int64_t ds, const char *src, int64_t ss, int64_t rows, int64_t n,
                     int64_t stream, scout_t *scout) {
    if (ss == n && ds == n) {    /* one run of bytes: split it for the scout */
        int64_t whole = rows * n;
        n = ss = ds = least(whole, CHUNK_BYTES);
        rows = whole / n;
        put(dst + rows * n, src + rows * n, whole - rows * n, stream);
    }
    int64_t batch = n < CHUNK_BYTES ? CHUNK_BYTES / n : 1;
    int whole_lines = stream && (((uintptr_t)dst | ds | n) & (LINE - 1)) == 0;
    for (int64_t r = 0; r < rows; r += batch) {
        int64_t end = least(r + batch, rows);
        for (int64_t i = r; i < end; i++) {
            if (whole_lines)
                stream_lines(dst + i * ds, src + i * ss, n);
            else
                put(dst + i * ds, src + i * ss, n, stream);
        }
        look_ahead(scout, (end - r) * n);
    }
}

/* Transposes. dst[c * dst_row + r] = src[r * src_row + c]; strides in elements. */

/* Three rounds of unpacking turn x[row] into y[column]: 8 x 8 elements in each 128-bit lane. */
#define TRANSPOSE_8X8(vec, lo16, hi16, lo32, hi32, lo64, hi64, x, y)                              \
    do {                                                                                          \
        vec a_[8], b_[8];                                                                         \
        for (int i = 0; i < 4; i++) {                                                             \
            a_[2 * i] = lo16(x[2 * i], x[2 * i + 1]);                                             \
            a_[2 * i + 1] = hi16(x[2 * i], x[2 * i + 1]);                                         \
        }                                                                                         \
        for (int i = 0; i < 8; i += 4)                                                            \
            for (int k = 0; k < 2; k++) {                                                         \
                b_[i + 2 * k] = lo32(a_[i + k], a_[i + k + 2]);                                   \
                b_[i + 2 * k + 1] = hi32(a_[i + k], a_[i + k + 2]);                               \
            }                                                                                     \
        for (int i = 0; i < 4; i++) {                                                             \
            y[2 * i] = lo64(b_[i], b_[i + 4]);                                                    \
            y[2 * i + 1] = hi64(b_[i], b_[i + 4]);                                                \
        }                                                                                         \
    } while (0)

#if HAVE_SSE2
static inline void transpose_8x8(uint16_t *dst, int64_t dst_row, const uint16_t *src,
                                 int64_t src_row) {
    __m128i x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = _mm_loadu_si128((const __m128i *)(src + i * src_row));
    TRANSPOSE_8X8(__m128i, _mm_unpacklo_epi16, _mm_unpackhi_epi16, _mm_unpacklo_epi32,
                  _mm_unpackhi_epi32, _mm_unpacklo_epi64, _mm_unpackhi_epi64, x, y);
    for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i *)(dst + i * dst_row), y[i]);
}

/* 16 rows of 8: the lower 8 rows in the lower lanes, the upper 8 in the upper. */
AVX2 static inline void transpose_16x8(uint16_t *dst, int64_t dst_row, const uint16_t *src,
                                       int64_t src_row) {
    __m256i x[8], y[8];
    for (int i = 0; i < 8; i++)
        x[i] = _mm256_loadu2_m128i((const __m128i *)(src + (i + 8) * src_row),
                                   (const __m128i *)(src + i * src_row));
    TRANSPOSE_8X8(__m256i, _mm256_unpacklo_epi16, _mm256_unpackhi_epi16, _mm256_unpacklo_epi32,
                  _mm256_unpackhi_epi32, _mm256_unpacklo_epi64, _mm256_unpackhi_epi64, x, y);
    for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i *)(dst + i * dst_row), y[i]);
}

AVX2 static void transpose_16(uint16_t *dst, int64_t dst_row, const uint16_t *src, int64_t src_row,
                              int64_t cols) {
    for (int64_t c = 0; c < cols; c += 8)
        transpose_16x8(dst + c * dst_row, dst_row, src + c, src_row);
}
#endif

#if HAVE_SSE2
static inline void transpose_4x4(uint32_t *dst, int64_t dst_row, const uint32_t *src,
                                 int64_t src_row) {
    __m128i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm_loadu_si128((const __m128i *)(src + i * src_row));
    __m128i a = _mm_unpacklo_epi32(x[0], x[1]), b = _mm_unpackhi_epi32(x[0], x[1]);
    __m128i c = _mm_unpacklo_epi32(x[2], x[3]), d = _mm_unpackhi_epi32(x[2], x[3]);
    _mm_storeu_si128((__m128i *)dst, _mm_unpacklo_epi64(a, c));
    _mm_storeu_si128((__m128i *)(dst + dst_row), _mm_unpackhi_epi64(a, c));
    _mm_storeu_si128((__m128i *)(dst + 2 * dst_row), _mm_unpacklo_epi64(b, d));
    _mm_storeu_si128((__m128i *)(dst + 3 * dst_row), _mm_unpackhi_epi64(b, d));
}
#endif

static void transpose_2(uint16_t *dst, int64_t dst_row, const uint16_t *src, int64_t src_row,
                        int64_t rows, int64_t cols, int avx2) {
    int64_t r = 0, whole = 0;
#if HAVE_SSE2
    whole = cols / 8 * 8;
    for (; avx2 && r + 16 <= rows; r += 16)
        transpose_16(dst + r, dst_row, src + r * src_row, src_row, whole);
    for (; r + 8 <= rows; r += 8)
        for (int64_t c = 0; c < whole; c += 8)
            transpose_8x8(dst + c * dst_row + r, dst_row, src + r * src_row + c, src_row);
#endif
    (void)avx2;
    for (int64_t c = whole; c < cols; c++)
        for (int64_t i = 0; i < r; i++) dst[c * dst_row + i] = src[i * src_row + c];
    for (; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) dst[c * dst_row + r] = src[r * src_row + c];
}

static void transpose_4(uint32_t *dst, int64_t dst_row, const uint32_t *src, int64_t src_row,
                        int64_t rows, int64_t cols) {
    int64_t r = 0, whole = 0;
#if HAVE_SSE2
    whole = cols / 4 * 4;
    for (; r + 4 <= rows; r += 4)
        for (int64_t c = 0; c < whole; c += 4)
            transpose_4x4(dst + c * dst_row + r, dst_row, src + r * src_row + c, src_row);
#endif
    for (int64_t c = whole; c < cols; c++)
        for (int64_t i = 0; i < r; i++) dst[c * dst_row + i] = src[i * src_row + c];
    for (; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) dst[c * dst_row + r] = src[r * src_row + c];
}

/* For elements of 2 or 4 bytes. Both sides are aligned to the element. */
static void transpose(const job_t *j, char *dst, int64_t dst_row, const char *src, int64_t src_row,
                      int64_t rows, int64_t cols) {
    if (j->r.size == 2)
        transpose_2((uint16_t *)dst, dst_row, (const uint16_t *)src, src_row, rows, cols, j->avx2);
    else
        transpose_4((uint32_t *)dst, dst_row, (const uint32_t *)src, src_row, rows, cols);
}

static void step_rows(const job_t *j, const step_t *s, scout_t *scout) {
    const plane_t *sp = src_plane(j, s), *dp = dst_plane(j, s);
    for (int64_t k = 0; k < s->run; k++)
        put_rows(dst_tile(j, s, k), dp->token * j->r.size, src_tile(j, s, k),
                 sp->token * j->r.size, step_tokens(j, s), sp->head_dim * j->r.size, j->r.stream,
                 scout);
}

/* The run's units are adjacent in the source: rows of run * tokens elements. */
static void step_to_rows(const job_t *j, const step_t *s, char *tile, scout_t *scout) {
    const plane_t *sp = src_plane(j, s), *dp = dst_plane(j, s);
    int64_t dim = sp->head_dim, tokens = step_tokens(j, s), width = s->run * tokens;
    int64_t size = j->r.size, row = dim * size, apart = dp->token * size;
    const char *src = src_tile(j, s, 0);
    for (int64_t t = 0, n; t < width; t += n) {
        n = least(LINE / size, width - t);
        for (int64_t d = 0; d < dim; d += 16)
            transpose(j, tile + d * size, dim, src + (d * sp->dim + t) * size, sp->dim,
                      least(16, dim - d), n);
        for (int64_t i = 0, m; i < n; i += m) {
            int64_t inside = (t + i) % tokens;
            m = least(n - i, tokens - inside);
            put_rows(dst_tile(j, s, (t + i) / tokens) + inside * apart, apart, tile + i * row, row,
                     m, row, j->r.stream, scout);
        }
    }
}

/* The run's units are adjacent in the destination: rows of run * tokens elements. */
static void step_to_columns(const job_t *j, const step_t *s, char *tile, scout_t *scout) {
    const plane_t *sp = src_plane(j, s), *dp = dst_plane(j, s);
    int64_t dim = sp->head_dim, tokens = step_tokens(j, s), width = s->run * tokens;
    int64_t size = j->r.size, row = width * size, cols = LINE / size;
    for (int64_t k = 0; k < s->run; k++) {
        const char *src = src_tile(j, s, k);
        for (int64_t t = 0; t < tokens; t += 16)
            for (int64_t d = 0; d < dim; d += cols)
                transpose(j, tile + d * row + (k * tokens + t) * size, width,
                          src + (t * sp->token + d) * size, sp->token, least(16, tokens - t),
                          least(cols, dim - d));
    }
    put_rows(dst_tile(j, s, 0), dp->dim * size, tile, row, dim, row, j->r.stream, scout);
}

static void step_elements(const job_t *j, const step_t *s) {
    const plane_t *sp = src_plane(j, s), *dp = dst_plane(j, s);
    for (int64_t k = 0; k < s->run; k++) {
        int64_t a = j->r.src_units[s->unit + k], b = j->r.dst_units[s->unit + k];
        int64_t s0 = a % j->r.src_per_page * j->r.tokens + s->first;
        int64_t d0 = b % j->r.dst_per_page * j->r.tokens + s->first;
        int64_t from = a / j->r.src_per_page * sp->page + s->head * sp->head;
        int64_t to = b / j->r.dst_per_page * dp->page + s->head * dp->head;
        for (int64_t t = 0; t < step_tokens(j, s); t++) {
            int64_t x = from + at(s0 + t, sp->token, sp->token_inner, sp->token_inner_stride);
            int64_t y = to + at(d0 + t, dp->token, dp->token_inner, dp->token_inner_stride);
            for (int64_t d = 0; d < sp->head_dim; d++) {
                int64_t p = x + at(d, sp->dim, sp->dim_inner, sp->dim_inner_stride);
                int64_t q = y + at(d, dp->dim, dp->dim_inner, dp->dim_inner_stride);
                memcpy(dp->base + q * j->r.size, sp->base + p * j->r.size, (size_t)j->r.size);
            }
        }
    }
}

/* Tokens of one run in columns: as many whole lines as a tile, or the scout's lead, holds. */
static int64_t most_in_columns(kind_t kind, int64_t head_dim, int64_t size) {
    int64_t bytes = kind == TO_ROWS ? AHEAD_BYTES : TILE_BYTES;
    return bytes / head_dim / LINE * LINE / size;
}

/* Decides how to split the copy, so that every plane can be copied in that way. */
static job_t plan(const request_t *r) {
    job_t j = {*r, r->src_units, r->src_per_page, r->units, r->tokens, 0};
#if HAVE_SSE2
    j.avx2 = KVCORE_SIMD >= 2 && __builtin_cpu_supports("avx2");
#endif
    int seen[4] = {0};
    for (int64_t i = 0; i < r->layers * r->kv_factor; i++) {
        const plane_t *sp = r->src + i, *dp = r->dst + i;
        kind_t kind = kind_of(sp, dp, r->size);
        seen[kind] = 1;
        if (kind == TO_ROWS || kind == TO_COLUMNS) {
            int64_t most = most_in_columns(kind, sp->head_dim, r->size);
            j.piece = least(j.piece, most);
            j.run_units = least(j.run_units, most / r->tokens);
        }
        int64_t together = 1;    /* rows of one token that are adjacent on one side */
        if (token_major(sp) || token_major(dp)) together = r->heads * r->kv_factor;
        else if (kv_together(r, r->src, i) || kv_together(r, r->dst, i)) together = r->kv_factor;
        if (together > 1) {
            int64_t bytes = together * sp->head_dim * r->size;
            j.piece = least(j.piece, (PIECE_BYTES + bytes - 1) / bytes);
        }
    }
    if (seen[TO_COLUMNS]) {
        j.side_units = r->dst_units;
        j.side_per_page = r->dst_per_page;
    }
    if (j.piece < r->tokens || j.run_units < 1 || (seen[TO_ROWS] && seen[TO_COLUMNS]))
        j.run_units = 1;
    return j;
}

/* Copies as `r` says. Source and destination must not overlap. Nothing is checked here. */
void kvcore_copy(const request_t *r) {
    char tile[TILE_BYTES] __attribute__((aligned(LINE)));
    if (!r->layers || !r->heads) return;
    job_t j = plan(r);
    step_t s = {0};
    if (!find_run(&j, &s)) return;
    scout_t scout = {.j = &j, .step = s, .alive = 1};
    scout_step(&scout);
    look_ahead(&scout, AHEAD_BYTES);
    do {
        switch (kind_of(src_plane(&j, &s), dst_plane(&j, &s), r->size)) {
            case ROWS: step_rows(&j, &s, &scout); break;
            case TO_ROWS: step_to_rows(&j, &s, tile, &scout); break;
            case TO_COLUMNS: step_to_columns(&j, &s, tile, &scout); break;
            case ELEMENTS: step_elements(&j, &s); break;
        }
    } while (next_step(&j, &s));
#if HAVE_SSE2
    _mm_sfence();
#endif
}

static inline uint64_t mixed_word(uint64_t x, uint64_t number) {
    x = (x ^ number * SUM_KEY) * SUM_FIRST;
    x = (x ^ x >> 32) * SUM_SECOND;
    return x ^ x >> 29;
}

/* The sum of whole words, the first of which has this number. Inlined into one function for each
 * width of vectors. */
static inline __attribute__((always_inline)) uint64_t words_sum(const char *data, int64_t words,
                                                                uint64_t number) {
    uint64_t total = 0;
    for (int64_t i = 0; i < words; i++) {
        uint64_t x;
        memcpy(&x, data + 8 * i, 8);
        total += mixed_word(x, number + (uint64_t)i);
    }
    return total;
}

static uint64_t words_sum_any(const char *data, int64_t words, uint64_t number) {
    return words_sum(data, words, number);
}

#if HAVE_SSE2
AVX2 static uint64_t words_sum_avx2(const char *data, int64_t words, uint64_t number) {
    return words_sum(data, words, number);
}

/* AVX-512 multiplies words of 64 bits in one step, AVX2 in three. */
__attribute__((target("avx512f,avx512dq,prefer-vector-width=512"))) static uint64_t
words_sum_avx512(const char *data, int64_t words, uint64_t number) {
    return words_sum(data, words, number);
}
#endif

/* The sum that kvcore/memory/checksums.py specifies, over n bytes that begin at word `first` of the
 * block. */
uint64_t kvcore_sum(const char *data, int64_t n, int64_t first) {
    uint64_t (*sum)(const char *, int64_t, uint64_t) = words_sum_any;
    const int64_t words = n / 8;
    uint64_t last = 0, number = (uint64_t)first + 1;
#if HAVE_SSE2
    if (KVCORE_SIMD >= 3 && __builtin_cpu_supports("avx512dq")) sum = words_sum_avx512;
    else if (KVCORE_SIMD >= 2 && __builtin_cpu_supports("avx2")) sum = words_sum_avx2;
#endif
    const uint64_t total = sum(data, words, number);
    if (n % 8 == 0) return total;
    memcpy(&last, data + 8 * words, (size_t)(n % 8));
    return total + mixed_word(last, number + (uint64_t)words);
}

/* The version of the functions and structures above, for the caller to check. */
int64_t kvcore_copy_abi(void) { return ABI; }
