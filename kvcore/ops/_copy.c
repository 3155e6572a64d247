/* Copies of KV units between two strided layouts in host memory.
 *
 * A unit is `tokens` consecutive tokens of one page. For every plane (K or V of one layer), head and
 * unit, a tile of tokens x dim elements moves from source to destination. Three shapes of tile are
 * fast, everything else goes element by element:
 *
 *   rows        both sides keep a token's dims together: runs of bytes
 *   to rows     source keeps tokens together (column-major K), destination dims: a transpose
 *   to columns  the reverse
 *
 * Large copies write around the cache (streaming stores): the destination is not read soon, and a
 * normal store would first read the line it overwrites. Plain C11, no Python; built by build.py.
 */
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#define HAVE_SSE2 1
#else
#define HAVE_SSE2 0
#endif

typedef struct {
    char *base;              /* address of element (page 0, head 0, token 0, dim 0) */
    int64_t page, head;      /* strides in elements, as all below */
    int64_t token, token_inner, token_inner_stride;
    int64_t dim, dim_inner, dim_inner_stride;
    int64_t head_dim;
} plane_t;

#define RUN_UNITS 16         /* units of one page that are worked on together, at most */
#define TILE_BYTES (64 * 1024)

static inline int64_t at(int64_t i, int64_t stride, int64_t inner, int64_t inner_stride) {
    return inner == 1 ? i * stride : i / inner * stride + i % inner * inner_stride;
}

static void put(char *dst, const char *src, int64_t n, int stream) {
#if HAVE_SSE2
    if (stream && ((uintptr_t)dst & 15) == 0 && (n & 15) == 0) {
        int64_t i = 0;
        for (; i + 64 <= n; i += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)(src + i));
            __m128i b = _mm_loadu_si128((const __m128i *)(src + i + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(src + i + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(src + i + 48));
            _mm_stream_si128((__m128i *)(dst + i), a);
            _mm_stream_si128((__m128i *)(dst + i + 16), b);
            _mm_stream_si128((__m128i *)(dst + i + 32), c);
            _mm_stream_si128((__m128i *)(dst + i + 48), d);
        }
        for (; i < n; i += 16)
            _mm_stream_si128((__m128i *)(dst + i), _mm_loadu_si128((const __m128i *)(src + i)));
        return;
    }
#endif
    (void)stream;
    memcpy(dst, src, (size_t)n);
}

/* dst[c * dst_row + r] = src[r * src_row + c] for r < rows, c < cols; strides in elements. */
static void transpose16(uint16_t *dst, int64_t dst_row, const uint16_t *src, int64_t src_row,
                        int64_t rows, int64_t cols) {
    int64_t r = 0;
#if HAVE_SSE2
    for (; r + 8 <= rows; r += 8) {
        int64_t c = 0;
        for (; c + 8 <= cols; c += 8) {
            const uint16_t *s = src + r * src_row + c;
            uint16_t *d = dst + c * dst_row + r;
            __m128i x0 = _mm_loadu_si128((const __m128i *)(s + 0 * src_row));
            __m128i x1 = _mm_loadu_si128((const __m128i *)(s + 1 * src_row));
            __m128i x2 = _mm_loadu_si128((const __m128i *)(s + 2 * src_row));
            __m128i x3 = _mm_loadu_si128((const __m128i *)(s + 3 * src_row));
            __m128i x4 = _mm_loadu_si128((const __m128i *)(s + 4 * src_row));
            __m128i x5 = _mm_loadu_si128((const __m128i *)(s + 5 * src_row));
            __m128i x6 = _mm_loadu_si128((const __m128i *)(s + 6 * src_row));
            __m128i x7 = _mm_loadu_si128((const __m128i *)(s + 7 * src_row));
            __m128i a0 = _mm_unpacklo_epi16(x0, x1), a1 = _mm_unpackhi_epi16(x0, x1);
            __m128i a2 = _mm_unpacklo_epi16(x2, x3), a3 = _mm_unpackhi_epi16(x2, x3);
            __m128i a4 = _mm_unpacklo_epi16(x4, x5), a5 = _mm_unpackhi_epi16(x4, x5);
            __m128i a6 = _mm_unpacklo_epi16(x6, x7), a7 = _mm_unpackhi_epi16(x6, x7);
            __m128i b0 = _mm_unpacklo_epi32(a0, a2), b1 = _mm_unpackhi_epi32(a0, a2);
            __m128i b2 = _mm_unpacklo_epi32(a1, a3), b3 = _mm_unpackhi_epi32(a1, a3);
            __m128i b4 = _mm_unpacklo_epi32(a4, a6), b5 = _mm_unpackhi_epi32(a4, a6);
            __m128i b6 = _mm_unpacklo_epi32(a5, a7), b7 = _mm_unpackhi_epi32(a5, a7);
            _mm_storeu_si128((__m128i *)(d + 0 * dst_row), _mm_unpacklo_epi64(b0, b4));
            _mm_storeu_si128((__m128i *)(d + 1 * dst_row), _mm_unpackhi_epi64(b0, b4));
            _mm_storeu_si128((__m128i *)(d + 2 * dst_row), _mm_unpacklo_epi64(b1, b5));
            _mm_storeu_si128((__m128i *)(d + 3 * dst_row), _mm_unpackhi_epi64(b1, b5));
            _mm_storeu_si128((__m128i *)(d + 4 * dst_row), _mm_unpacklo_epi64(b2, b6));
            _mm_storeu_si128((__m128i *)(d + 5 * dst_row), _mm_unpackhi_epi64(b2, b6));
            _mm_storeu_si128((__m128i *)(d + 6 * dst_row), _mm_unpacklo_epi64(b3, b7));
            _mm_storeu_si128((__m128i *)(d + 7 * dst_row), _mm_unpackhi_epi64(b3, b7));
        }
        for (; c < cols; c++)
            for (int64_t k = r; k < r + 8; k++) dst[c * dst_row + k] = src[k * src_row + c];
    }
#endif
    for (; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) dst[c * dst_row + r] = src[r * src_row + c];
}

static void tile_elements(const plane_t *sp, const char *src, int64_t s0, const plane_t *dp,
                          char *dst, int64_t d0, int64_t tokens, int64_t size) {
    for (int64_t t = 0; t < tokens; t++) {
        int64_t so = at(s0 + t, sp->token, sp->token_inner, sp->token_inner_stride);
        int64_t to = at(d0 + t, dp->token, dp->token_inner, dp->token_inner_stride);
        for (int64_t d = 0; d < sp->head_dim; d++) {
            int64_t a = so + at(d, sp->dim, sp->dim_inner, sp->dim_inner_stride);
            int64_t b = to + at(d, dp->dim, dp->dim_inner, dp->dim_inner_stride);
            memcpy(dst + b * size, src + a * size, (size_t)size);
        }
    }
}

static int plain(const plane_t *p) { return p->token_inner == 1 && p->dim_inner == 1; }
static int in_rows(const plane_t *p) { return plain(p) && p->dim == 1; }
static int in_columns(const plane_t *p) { return plain(p) && p->token == 1 && p->dim != 1; }

typedef struct {
    const plane_t *sp, *dp;
    const int64_t *src_units, *dst_units;
    int64_t tokens, src_per_page, dst_per_page, size;
    int stream;
} job_t;

static const char *src_head(const job_t *j, int64_t unit, int64_t h) {
    return j->sp->base + (unit / j->src_per_page * j->sp->page + h * j->sp->head) * j->size;
}
static char *dst_head(const job_t *j, int64_t unit, int64_t h) {
    return j->dp->base + (unit / j->dst_per_page * j->dp->page + h * j->dp->head) * j->size;
}

static void unit_rows(const job_t *j, int64_t i, int64_t h) {
    int64_t s0 = j->src_units[i] % j->src_per_page * j->tokens;
    int64_t d0 = j->dst_units[i] % j->dst_per_page * j->tokens;
    const char *src = src_head(j, j->src_units[i], h) + s0 * j->sp->token * j->size;
    char *dst = dst_head(j, j->dst_units[i], h) + d0 * j->dp->token * j->size;
    int64_t row = j->sp->head_dim * j->size;
    if (j->sp->token == j->sp->head_dim && j->dp->token == j->dp->head_dim) {
        put(dst, src, row * j->tokens, j->stream);
        return;
    }
    for (int64_t t = 0; t < j->tokens; t++)
        put(dst + t * j->dp->token * j->size, src + t * j->sp->token * j->size, row, j->stream);
}

static void unit_to_rows(const job_t *j, int64_t i, int64_t h, uint16_t *tile) {
    int64_t s0 = j->src_units[i] % j->src_per_page * j->tokens;
    int64_t d0 = j->dst_units[i] % j->dst_per_page * j->tokens;
    const uint16_t *src = (const uint16_t *)src_head(j, j->src_units[i], h) + s0;
    char *dst = dst_head(j, j->dst_units[i], h) + d0 * j->dp->token * j->size;
    int64_t dim = j->sp->head_dim, row = dim * 2;
    transpose16(tile, dim, src, j->sp->dim, dim, j->tokens);
    if (j->dp->token == dim) {
        put(dst, (const char *)tile, row * j->tokens, j->stream);
        return;
    }
    for (int64_t t = 0; t < j->tokens; t++)
        put(dst + t * j->dp->token * 2, (const char *)(tile + t * dim), row, j->stream);
}

/* A run of units that lie side by side in one destination page: rows of run * tokens elements. */
static void run_to_columns(const job_t *j, int64_t i, int64_t run, int64_t h, uint16_t *tile) {
    int64_t dim = j->sp->head_dim, width = run * j->tokens;
    for (int64_t k = 0; k < run; k++) {
        int64_t s0 = j->src_units[i + k] % j->src_per_page * j->tokens;
        const uint16_t *src =
            (const uint16_t *)src_head(j, j->src_units[i + k], h) + s0 * j->sp->token;
        transpose16(tile + k * j->tokens, width, src, j->sp->token, j->tokens, dim);
    }
    int64_t d0 = j->dst_units[i] % j->dst_per_page * j->tokens;
    uint16_t *dst = (uint16_t *)dst_head(j, j->dst_units[i], h) + d0;
    /* Lines that this run fills only in part are completed in the cache by the next run. */
    int stream = j->stream && width * 2 % 64 == 0;
    for (int64_t d = 0; d < dim; d++)
        put((char *)(dst + d * j->dp->dim), (const char *)(tile + d * width), width * 2, stream);
}

static int64_t run_length(const job_t *j, int64_t i, int64_t n) {
    int64_t room = TILE_BYTES / (j->tokens * j->sp->head_dim * j->size);
    int64_t most = room < RUN_UNITS ? room : RUN_UNITS, run = 1;
    if (j->src_units[i] < 0 || j->dst_units[i] < 0) return 1;
    while (run < most && i + run < n && j->src_units[i + run] >= 0 &&
           j->dst_units[i + run] == j->dst_units[i] + run &&
           j->dst_units[i + run] / j->dst_per_page == j->dst_units[i] / j->dst_per_page)
        run++;
    return run;
}

/* Copies `units` units of `tokens` tokens for `planes` planes and `heads` heads. A unit that is
 * negative on either side is left out. */
void kvcore_copy(const plane_t *src, const plane_t *dst, int64_t planes, const int64_t *src_units,
                const int64_t *dst_units, int64_t units, int64_t tokens, int64_t src_per_page,
                int64_t dst_per_page, int64_t heads, int64_t size, int stream) {
    static _Thread_local uint16_t tile[TILE_BYTES / 2] __attribute__((aligned(64)));
    for (int64_t p = 0; p < planes; p++) {
        job_t j = {src + p, dst + p, src_units, dst_units, tokens,
                   src_per_page, dst_per_page, size, stream};
        int rows = in_rows(j.sp) && in_rows(j.dp);
        int fits = size == 2 && tokens * j.sp->head_dim * size <= TILE_BYTES;
        int to_rows = fits && in_columns(j.sp) && in_rows(j.dp);
        int to_columns = fits && in_rows(j.sp) && in_columns(j.dp);
        for (int64_t i = 0, run; i < units; i += run) {
            run = run_length(&j, i, units);
            if (src_units[i] < 0 || dst_units[i] < 0) continue;
            for (int64_t h = 0; h < heads; h++) {
                if (to_columns) {
                    run_to_columns(&j, i, run, h, tile);
                    continue;
                }
                for (int64_t k = i; k < i + run; k++) {
                    if (rows)
                        unit_rows(&j, k, h);
                    else if (to_rows)
                        unit_to_rows(&j, k, h, tile);
                    else
                        tile_elements(j.sp, src_head(&j, src_units[k], h),
                                      src_units[k] % src_per_page * tokens, j.dp,
                                      dst_head(&j, dst_units[k], h),
                                      dst_units[k] % dst_per_page * tokens, tokens, size);
                }
            }
        }
    }
#if HAVE_SSE2
    _mm_sfence();
#endif

}

/* Bytes of plane_t, so that the caller can check that it passes the same structure. */
int64_t kvcore_copy_plane_size(void) { return (int64_t)sizeof(plane_t); }
