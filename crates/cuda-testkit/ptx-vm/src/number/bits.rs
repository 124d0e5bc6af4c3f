//! Logic, shifts of pairs, fields and permutations of bits.

use crate::number::integer::Integer;
use crate::types::low_bits;

pub(crate) fn identity(a: u64, _: u64, _: u64) -> u64 {
    a
}

pub(crate) fn and(a: u64, b: u64, _: u64) -> u64 {
    a & b
}

pub(crate) fn or(a: u64, b: u64, _: u64) -> u64 {
    a | b
}

pub(crate) fn xor(a: u64, b: u64, _: u64) -> u64 {
    a ^ b
}

pub(crate) fn not<T: Integer>(a: u64, _: u64, _: u64) -> u64 {
    T::of(!a).bits()
}

pub(crate) fn not_predicate(a: u64, _: u64, _: u64) -> u64 {
    u64::from(a == 0)
}

/// 1 for zero, else 0.
pub(crate) fn is_zero(a: u64, _: u64, _: u64) -> u64 {
    u64::from(a == 0)
}

pub(crate) fn count_ones(a: u64, _: u64, _: u64) -> u64 {
    u64::from(a.count_ones())
}

pub(crate) fn leading_zeros<T: Integer>(a: u64, _: u64, _: u64) -> u64 {
    u64::from(a.leading_zeros() - (64 - T::BITS))
}

pub(crate) fn reversed<T: Integer>(a: u64, _: u64, _: u64) -> u64 {
    a.reverse_bits() >> (64 - T::BITS)
}

/// The place of the highest bit that is not the sign's; all ones if there is none.
pub(crate) fn highest_bit<T: Integer>(a: u64, _: u64, _: u64) -> u64 {
    let value = T::of(a).wide();
    let magnitude = if value < 0 { !value } else { value };
    if magnitude == 0 {
        low_bits(32)
    } else {
        u64::from(magnitude.ilog2())
    }
}

/// A field of `length` bits from `position`, extended with its sign if the type has one.
pub(crate) fn extract<T: Integer>(a: u64, position: u64, length: u64) -> u64 {
    let (position, length) = ((position & 0xff) as u32, (length & 0xff) as u32);
    if length == 0 {
        return 0;
    }
    let inside = length.min(T::BITS.saturating_sub(position));
    let field = if position >= T::BITS {
        0
    } else {
        (a >> position) & low_bits(inside)
    };
    // The sign is the field's last bit, or the operand's if the field ends beyond it.
    let sign_place = (position + length - 1).min(T::BITS - 1);
    let is_signed = T::of(u64::MAX).wide() < 0;
    let is_negative = is_signed && (a >> sign_place) & 1 != 0;
    let fill = if is_negative { !low_bits(inside) } else { 0 };
    T::of(field | fill).bits()
}

/// Puts the low bits of the first operand into the second. The others are position and length.
pub(crate) fn insert<T: Integer>(operands: [u64; 4]) -> u64 {
    let [a, b, position, length] = operands;
    let (position, length) = ((position & 0xff) as u32, (length & 0xff) as u32);
    if position >= T::BITS {
        return b;
    }
    let field = low_bits(length.min(T::BITS - position)) << position;
    (b & !field) | ((a << position) & field)
}

/// Any function of three bits: bit `4a + 2b + c` of the table is its result.
pub(crate) fn lookup(operands: [u64; 4]) -> u64 {
    let [a, b, c, table] = operands;
    let choose = |index: u32, place: u32, bits: u64| if (index >> place) & 1 != 0 { bits } else { !bits };
    let minterms = (0..8_u32).filter(|index| (table >> index) & 1 != 0);
    let result = minterms.fold(0, |sum, i| sum | (choose(i, 2, a) & choose(i, 1, b) & choose(i, 0, c)));
    result & low_bits(32)
}

/// Four bytes of eight. The highest bit of a selector repeats the sign of its byte.
pub(crate) fn permute(a: u64, b: u64, selectors: u64) -> u64 {
    let bytes = (b << 32 | a).to_le_bytes();
    (0..4).fold(0, |result, place| {
        let selector = (selectors >> (4 * place)) & 0xf;
        let byte = bytes[(selector & 7) as usize];
        let is_sign = selector & 8 != 0;
        let chosen = match (is_sign, byte >= 0x80) {
            (false, _) => byte,
            (true, true) => 0xff,
            (true, false) => 0,
        };
        result | u64::from(chosen) << (8 * place)
    })
}

/// Shifts the pair (b, a) left and gives its upper half.
pub(crate) fn funnel_left<const WRAPS: bool>(a: u64, b: u64, by: u64) -> u64 {
    let by = if WRAPS { by & 31 } else { by.min(32) };
    ((b << 32 | a) << by) >> 32
}

/// Shifts the pair (b, a) right and gives its lower half.
pub(crate) fn funnel_right<const WRAPS: bool>(a: u64, b: u64, by: u64) -> u64 {
    let by = if WRAPS { by & 31 } else { by.min(32) };
    ((b << 32 | a) >> by) & low_bits(32)
}

/// The first operand if the third, a predicate, holds.
pub(crate) fn select(a: u64, b: u64, predicate: u64) -> u64 {
    if predicate != 0 { a } else { b }
}

/// The first operand if the third, a signed integer, is not negative.
pub(crate) fn select_not_negative(a: u64, b: u64, c: u64) -> u64 {
    if c as i32 >= 0 { a } else { b }
}

/// The first operand if the third, an f32, is zero or above. NaN is not.
pub(crate) fn select_not_negative_f32<const FLUSH: bool>(a: u64, b: u64, c: u64) -> u64 {
    let value = f32::from_bits(c as u32);
    let is_flushed = FLUSH && value.is_subnormal();
    if value >= 0.0 || is_flushed { a } else { b }
}

pub(crate) fn exchange(_: u64, new: u64, _: u64) -> u64 {
    new
}

/// The old value, what it is compared with, and what replaces it if they are equal.
pub(crate) fn compare_and_swap(old: u64, expected: u64, new: u64) -> u64 {
    if old == expected { new } else { old }
}
