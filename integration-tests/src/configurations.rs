//! The configurations that the token-exact comparison runs: every pair of settings occurs together at least once.

use std::fmt;

/// One way to run the same requests. All of them must give the same token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration {
    pub topology: &'static str,
    /// `--max-num-batched-tokens`: the chunk budget.
    pub chunk_tokens: u32,
    pub threads: u32,
    pub prefix_cache: bool,
    pub kernel: &'static str,
}

impl Configuration {
    pub fn has_prefill_pool(&self) -> bool {
        self.topology.contains('p')
    }
}

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = if self.prefix_cache { "on" } else { "off" };
        write!(
            f,
            "{} chunk={} threads={} prefix-cache={cache} kernel={}",
            self.topology, self.chunk_tokens, self.threads, self.kernel
        )
    }
}

const fn row(
    topology: &'static str,
    chunk_tokens: u32,
    threads: u32,
    prefix_cache: bool,
    kernel: &'static str,
) -> Configuration {
    Configuration {
        topology,
        chunk_tokens,
        threads,
        prefix_cache,
        kernel,
    }
}

/// Row 0 is the baseline: one co-located node. `auto` is the best kernel of the machine (AVX-512 VNNI where there is one). Eight rows cover all pairs of {topology 4} x {2} x {2} x {2} x {2 kernels};
/// the portable kernel, slow by design, has a row of its own in `PORTABLE`.
pub const PAIRWISE: [Configuration; 8] = [
    row("1c", 512, 1, false, "auto"),
    row("1c", 64, 2, true, "avx2"),
    row("2c", 64, 1, false, "avx2"),
    row("2c", 512, 2, true, "auto"),
    row("1p1d", 512, 1, true, "avx2"),
    row("1p1d", 64, 2, false, "auto"),
    row("2p2d", 64, 2, true, "avx2"),
    row("2p2d", 512, 1, false, "auto"),
];

/// The portable path, compared on fewer prompts.
pub const PORTABLE: Configuration = row("1p1d", 64, 2, true, "portable");

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn factors(c: &Configuration) -> [String; 5] {
        [
            c.topology.to_owned(),
            c.chunk_tokens.to_string(),
            c.threads.to_string(),
            c.prefix_cache.to_string(),
            c.kernel.to_owned(),
        ]
    }

    #[test]
    fn every_pair_of_settings_occurs_together() {
        let rows: Vec<[String; 5]> = PAIRWISE.iter().map(factors).collect();
        for a in 0..5 {
            for b in a + 1..5 {
                let left: BTreeSet<_> = rows.iter().map(|r| r[a].clone()).collect();
                let right: BTreeSet<_> = rows.iter().map(|r| r[b].clone()).collect();
                let seen: BTreeSet<_> = rows.iter().map(|r| (r[a].clone(), r[b].clone())).collect();
                for l in &left {
                    for r in &right {
                        assert!(seen.contains(&(l.clone(), r.clone())), "no row pairs {l} with {r}");
                    }
                }
            }
        }
    }
}
