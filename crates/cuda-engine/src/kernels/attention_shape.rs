//! What the kernels of attention are compiled for, and which models have none.

use thiserror::Error;

/// Values of a head that there is code for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeadDim {
    D64,
    D128,
}

impl HeadDim {
    pub const ALL: [HeadDim; 2] = [HeadDim::D64, HeadDim::D128];

    pub fn values(self) -> u32 {
        match self {
            HeadDim::D64 => 64,
            HeadDim::D128 => 128,
        }
    }
}

/// Most query heads for each KV head: each has its sums in registers.
pub(crate) const GROUP_MAX: u32 = 8;

/// What the kernels of attention are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttentionShape {
    pub(crate) head_dim: HeadDim,
    /// Query heads for each KV head.
    pub(crate) group: u32,
}

/// The model's attention has no kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnsupportedShape {
    #[error(
        "the GPU engine has no kernels for heads of {head_dim} values, only for 64 and 128; run this model with `--device cpu`"
    )]
    HeadDim { head_dim: usize },
    #[error(
        "the GPU engine has kernels for 1 to {GROUP_MAX} query heads for each KV head, the model has {heads} for {kv_heads}; run this model with `--device cpu`"
    )]
    Group { heads: usize, kv_heads: usize },
}

impl AttentionShape {
    /// # Errors
    /// A head size or a group that there is no code for.
    pub fn new(head_dim: usize, heads: usize, kv_heads: usize) -> Result<Self, UnsupportedShape> {
        let head_dim = match head_dim {
            64 => HeadDim::D64,
            128 => HeadDim::D128,
            _ => return Err(UnsupportedShape::HeadDim { head_dim }),
        };
        let group = heads.checked_div(kv_heads).filter(|group| group * kv_heads == heads);
        match group.and_then(|group| u32::try_from(group).ok()) {
            Some(group) if (1..=GROUP_MAX).contains(&group) => Ok(Self { head_dim, group }),
            _ => Err(UnsupportedShape::Group { heads, kv_heads }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_without_kernels_are_refused_by_name() {
        assert_eq!(
            AttentionShape::new(96, 32, 32),
            Err(UnsupportedShape::HeadDim { head_dim: 96 })
        );
        for (heads, kv_heads) in [(9, 2), (9, 1), (0, 1), (4, 0)] {
            assert_eq!(
                AttentionShape::new(64, heads, kv_heads),
                Err(UnsupportedShape::Group { heads, kv_heads })
            );
        }
        assert!(AttentionShape::new(64, 9, 3).is_ok() && AttentionShape::new(128, 64, 8).is_ok());
    }
}
