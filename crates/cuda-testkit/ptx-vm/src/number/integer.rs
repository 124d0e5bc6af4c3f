//! Integer arithmetic. Operands are computed in 128 bits, which hold every exact result or its low half.

use crate::types::low_bits;

pub(crate) trait Integer: Copy {
    const BITS: u32;
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn wide(self) -> i128;
}

macro_rules! integers {
    ($($signed:ident $unsigned:ident),*) => {$(
        integers!(@one $signed, $unsigned);
        integers!(@one $unsigned, $unsigned);
    )*};
    (@one $int:ident, $unsigned:ident) => {
        #[allow(clippy::unnecessary_cast, reason = "the macro also makes the 64-bit types")]
        impl Integer for $int {
            const BITS: u32 = <$int>::BITS;
            fn of(bits: u64) -> Self {
                bits as $int
            }
            fn bits(self) -> u64 {
                self as $unsigned as u64
            }
            fn wide(self) -> i128 {
                self as i128
            }
        }
    };
}
integers!(i16 u16, i32 u32, i64 u64);

fn wide<T: Integer>(bits: u64) -> i128 {
    T::of(bits).wide()
}

/// The low bits, as many as the type has.
fn narrow<T: Integer>(value: i128) -> u64 {
    T::of(value as u64).bits()
}

pub(crate) fn add<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a) + wide::<T>(b))
}

pub(crate) fn sub<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a) - wide::<T>(b))
}

fn product<T: Integer>(a: u64, b: u64) -> i128 {
    wide::<T>(a).wrapping_mul(wide::<T>(b))
}

pub(crate) fn mul_low<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(product::<T>(a, b))
}

pub(crate) fn mul_high<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(product::<T>(a, b) >> T::BITS)
}

/// The result has twice the bits.
pub(crate) fn mul_wide<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    product::<T>(a, b) as u64 & low_bits(2 * T::BITS)
}

pub(crate) fn mad_low<T: Integer>(a: u64, b: u64, c: u64) -> u64 {
    add::<T>(mul_low::<T>(a, b, 0), c, 0)
}

pub(crate) fn mad_high<T: Integer>(a: u64, b: u64, c: u64) -> u64 {
    add::<T>(mul_high::<T>(a, b, 0), c, 0)
}

/// The third operand and the result have twice the bits.
pub(crate) fn mad_wide<T: Integer>(a: u64, b: u64, c: u64) -> u64 {
    mul_wide::<T>(a, b, 0).wrapping_add(c) & low_bits(2 * T::BITS)
}

/// The lowest 24 bits with their sign, if the type has one.
fn of_24_bits<T: Integer>(bits: u64) -> i128 {
    wide::<T>(bits << (T::BITS - 24)) >> (T::BITS - 24)
}

/// The low 32 bits of a product of 24-bit numbers.
pub(crate) fn mul24_low<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(of_24_bits::<T>(a) * of_24_bits::<T>(b))
}

pub(crate) fn mad24_low<T: Integer>(a: u64, b: u64, c: u64) -> u64 {
    add::<T>(mul24_low::<T>(a, b, 0), c, 0)
}

/// Division by zero gives ones, as hardware does; PTX leaves it open.
pub(crate) fn div<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a).checked_div(wide::<T>(b)).unwrap_or(-1))
}

/// The remainder of a division by zero is the dividend; PTX leaves it open.
pub(crate) fn rem<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a).checked_rem(wide::<T>(b)).unwrap_or(wide::<T>(a)))
}

pub(crate) fn min<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a).min(wide::<T>(b)))
}

pub(crate) fn max<T: Integer>(a: u64, b: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a).max(wide::<T>(b)))
}

pub(crate) fn neg<T: Integer>(a: u64, _: u64, _: u64) -> u64 {
    narrow::<T>(-wide::<T>(a))
}

pub(crate) fn abs<T: Integer>(a: u64, _: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a).abs())
}

/// |a - b| + c
pub(crate) fn sad<T: Integer>(a: u64, b: u64, c: u64) -> u64 {
    narrow::<T>((wide::<T>(a) - wide::<T>(b)).abs() + wide::<T>(c))
}

/// A shift by the width or more gives zero.
pub(crate) fn shl<T: Integer>(a: u64, by: u64, _: u64) -> u64 {
    if by >= u64::from(T::BITS) {
        0
    } else {
        T::of(a << by).bits()
    }
}

/// A shift by the width or more leaves only copies of the sign, zeros for an unsigned type.
pub(crate) fn shr<T: Integer>(a: u64, by: u64, _: u64) -> u64 {
    narrow::<T>(wide::<T>(a) >> by.min(u64::from(T::BITS)))
}

/// The sum with the carry, and the carry out of it.
pub(crate) fn add_carry<T: Integer>(a: u64, b: u64, carry: u64) -> (u64, u64) {
    let sum = u128::from(a) + u128::from(b) + u128::from(carry);
    (narrow::<T>(sum as i128), u64::from(sum >> T::BITS != 0))
}

/// The difference less the borrow, and the borrow out of it.
pub(crate) fn sub_borrow<T: Integer>(a: u64, b: u64, borrow: u64) -> (u64, u64) {
    let difference = i128::from(a) - i128::from(b) - i128::from(borrow);
    (narrow::<T>(difference), u64::from(difference < 0))
}

/// Four products of bytes, added to `c`. Each operand's bytes have their own sign.
pub(crate) fn dot4<A: Byte, B: Byte>(a: u64, b: u64, c: u64) -> u64 {
    let products = (0..4).map(|i| A::of(a >> (8 * i)) * B::of(b >> (8 * i)));
    (products.sum::<i64>() as u64).wrapping_add(c) & low_bits(32)
}

pub(crate) trait Byte {
    fn of(bits: u64) -> i64;
}

impl Byte for u8 {
    fn of(bits: u64) -> i64 {
        i64::from(bits as u8)
    }
}

impl Byte for i8 {
    fn of(bits: u64) -> i64 {
        i64::from(bits as i8)
    }
}
