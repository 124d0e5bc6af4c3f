//! The types that PTX gives to instructions and registers.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    const NAMES: [(&'static str, Type); 19] = [
        ("pred", Type::Pred),
        ("b8", Type::B8),
        ("b16", Type::B16),
        ("b32", Type::B32),
        ("b64", Type::B64),
        ("u8", Type::U8),
        ("u16", Type::U16),
        ("u32", Type::U32),
        ("u64", Type::U64),
        ("s8", Type::S8),
        ("s16", Type::S16),
        ("s32", Type::S32),
        ("s64", Type::S64),
        ("f16", Type::F16),
        ("f16x2", Type::F16x2),
        ("bf16", Type::Bf16),
        ("bf16x2", Type::Bf16x2),
        ("f32", Type::F32),
        ("f64", Type::F64),
    ];

    /// The name has no dot.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, ty)| *ty)
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Type::Pred | Type::B8 | Type::U8 | Type::S8 => 1,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16 => 2,
            Type::B32 | Type::U32 | Type::S32 | Type::F32 | Type::F16x2 | Type::Bf16x2 => 4,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 => 8,
        }
    }

    /// 8, 16, 32 or 64.
    pub(crate) fn bits(self) -> u32 {
        match self.bytes() {
            1 => 8,
            2 => 16,
            4 => 32,
            _ => 64,
        }
    }

    pub(crate) fn mask(self) -> u64 {
        low_bits(self.bits())
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    /// One floating-point number, not a pair.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Type::F16 | Type::Bf16 | Type::F32 | Type::F64)
    }

    /// Whether it is an integer or untyped bits.
    pub(crate) fn is_integer(self) -> bool {
        !self.is_float() && !matches!(self, Type::Pred | Type::F16x2 | Type::Bf16x2)
    }

    /// The value of the low bits: with the sign of a signed type, else without.
    pub(crate) fn value(self, bits: u64) -> i128 {
        let low = bits & self.mask();
        if self.is_signed() {
            let unused = 64 - self.bits();
            i128::from(((low << unused) as i64) >> unused)
        } else {
            i128::from(low)
        }
    }

    /// The smallest and the largest value of an integer type.
    pub(crate) fn range(self) -> (i128, i128) {
        let half = 1_i128 << (self.bits() - 1);
        if self.is_signed() {
            (-half, half - 1)
        } else {
            (0, 2 * half - 1)
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES
            .iter()
            .find(|(_, ty)| ty == self)
            .map_or("", |(name, _)| *name);
        f.write_str(name)
    }
}

/// A mask of the lowest bits; 64 and more give all.
pub(crate) fn low_bits(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}
