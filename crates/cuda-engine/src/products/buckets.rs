//! Numbers of rows that cuBLASLt computes. A plan is made for one number, so steps are rounded up to few of them: the buffers
//! have room for the rows of padding, whose results nobody reads.

/// Rising; the last one is the capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowBuckets(Vec<u32>);

impl RowBuckets {
    /// Powers of two, from 64 on with one and a half times each between: at most a third of the rows is padding.
    pub fn up_to(capacity: u32) -> Self {
        let powers = (0..31).map(|power| 1_u32 << power);
        let steps = powers.flat_map(|power| [Some(power), (power >= 64).then_some(power / 2 * 3)]);
        let mut buckets: Vec<u32> = steps.flatten().take_while(|rows| *rows < capacity).collect();
        buckets.push(capacity.max(1));
        Self(buckets)
    }

    /// The bucket of a number of rows. `None` beyond the capacity.
    pub fn of(&self, rows: u32) -> Option<u32> {
        self.0.iter().copied().find(|bucket| *bucket >= rows)
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_rise_to_the_capacity_and_waste_at_most_a_third() {
        let buckets = RowBuckets::up_to(500);
        assert_eq!(
            buckets.iter().collect::<Vec<_>>(),
            [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 500]
        );
        for rows in 65..=500 {
            let bucket = buckets.of(rows).unwrap();
            assert!(bucket >= rows && 3 * (bucket - rows) <= bucket, "{rows} in {bucket}");
        }
        assert_eq!(buckets.of(501), None);
        assert_eq!(RowBuckets::up_to(64).of(33), Some(64));
        assert_eq!(RowBuckets::up_to(0).of(1), Some(1));
        assert!(RowBuckets::up_to(u32::MAX).of(70_000).is_some());
    }
}
