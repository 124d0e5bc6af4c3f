//! Loads, stores, atomics and asynchronous copies.

use super::{by_integer, require, take_space};
use crate::instruction::{Address, Atomic, Compute, CopyAsync, Load, Op, Source, Space, Store, Target};
use crate::number::{bits, float, integer};
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;
use crate::types::Type;

/// They choose caches. `.volatile` forbids `ptxas` to join accesses, which nobody does here.
const CACHE_HINTS: [&str; 17] = [
    "weak",
    "volatile",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];
/// The widest access.
const ACCESS_BYTES_MAX: usize = 16;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    match text.opcode() {
        "ld" => load(text),
        "st" => store(text),
        "cp" => copy_async(text),
        _ => atomic(text),
    }
}

/// The type, and how many values.
fn take_vector(text: &mut Operands<'_>) -> Result<(Type, usize), Refusal> {
    text.take_hints(&CACHE_HINTS);
    let count = text.take_one(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
    let ty = text.take_type()?;
    if ty == Type::Pred || ty.bytes() * count > ACCESS_BYTES_MAX {
        return Err(Refusal::Type(ty));
    }
    Ok((ty, count))
}

fn load(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let space = take_space(text).unwrap_or(Space::Generic);
    let is_read_only = text.take("nc");
    if is_read_only && space != Space::Global {
        return Err(Refusal::Modifier("nc".to_owned()));
    }
    let (ty, count) = take_vector(text)?;
    text.finish(2)?;
    let names = text.list(0)?;
    if names.len() != count {
        return Err(Refusal::OperandCount {
            found: names.len(),
            expected: count,
        });
    }
    let mut to = Vec::with_capacity(count);
    for name in names {
        let register = text.named_register(name)?;
        to.push(Target {
            register: register.index,
            ty: register.ty,
        });
    }
    Ok(Op::Load(Box::new(Load {
        space,
        address: text.address(1)?,
        ty,
        to,
        is_read_only,
    })))
}

fn store(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let space = take_space(text).unwrap_or(Space::Generic);
    if matches!(space, Space::Param | Space::Constant) {
        return Err(Refusal::Modifier(space.name().to_owned()));
    }
    let (ty, count) = take_vector(text)?;
    text.finish(2)?;
    let from = text.source_list(1, ty)?;
    if from.len() != count {
        return Err(Refusal::OperandCount {
            found: from.len(),
            expected: count,
        });
    }
    Ok(Op::Store(Box::new(Store {
        space,
        address: text.address(0)?,
        ty,
        from,
    })))
}

/// `atom`, and `red`, which gives no old value.
fn atomic(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let gives_old = text.opcode() == "atom";
    text.take_hints(&["relaxed", "cta", "gpu", "sys"]);
    let space = take_space(text).unwrap_or(Space::Generic);
    if !matches!(space, Space::Global | Space::Shared | Space::Generic) {
        return Err(Refusal::Missing("global or shared"));
    }
    let names = ["add", "min", "max", "and", "or", "xor", "exch", "cas"].map(|name| (name, name));
    let name = text.take_one(&names).ok_or(Refusal::Missing("its operation"))?;
    let ty = text.take_type()?;
    let f: Compute = match (name, ty) {
        // PTX ISA, "atom": in global memory subnormals are flushed.
        ("add", Type::F32) if space == Space::Shared => float::add::<false, false>,
        ("add", Type::F32) => float::add::<true, false>,
        ("add", Type::F64) => float::add_f64,
        _ if ty.is_float() || ty.bytes() < 4 => return Err(Refusal::Type(ty)),
        ("add", _) => by_integer!(ty, integer::add),
        ("min", _) => by_integer!(ty, integer::min),
        ("max", _) => by_integer!(ty, integer::max),
        ("and", _) => bits::and,
        ("or", _) => bits::or,
        ("xor", _) => bits::xor,
        ("cas", _) => bits::compare_and_swap,
        _ => bits::exchange,
    };
    let first = usize::from(gives_old);
    let values = if name == "cas" { 2 } else { 1 };
    text.finish(first + 1 + values)?;
    let second = if values == 2 {
        text.source(first + 2, ty)?
    } else {
        Source::Constant(0)
    };
    let operands = [text.source(first + 1, ty)?, second];
    let to = if gives_old { Some(text.register(0)?) } else { None };
    let address = text.address(first)?;
    Ok(Op::Atomic(Box::new(Atomic {
        space,
        address,
        bytes: ty.bytes(),
        f,
        operands,
        to,
    })))
}

fn copy_async(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    require(text, "async")?;
    if text.take("commit_group") {
        text.finish(0)?;
        return Ok(Op::CommitCopies);
    }
    if text.take("wait_all") {
        text.finish(0)?;
        return Ok(Op::WaitForAllCopies);
    }
    if text.take("wait_group") {
        text.finish(1)?;
        return Ok(Op::WaitForCopies {
            pending_max: constant(text, 0)? as u32,
        });
    }
    let is_cached_in_l2_only = text
        .take_one(&[("ca", false), ("cg", true)])
        .ok_or(Refusal::Missing("ca or cg"))?;
    text.take_hints(&["L2::64B", "L2::128B", "L2::256B"]);
    let is_to_shared = text.take("shared") || text.take("shared::cta");
    if !is_to_shared {
        return Err(Refusal::Missing("shared"));
    }
    require(text, "global")?;
    let operands = text.count().clamp(3, 4);
    text.finish(operands)?;
    let bytes = constant(text, 2)?;
    if !matches!((bytes, is_cached_in_l2_only), (4 | 8, false) | (16, _)) {
        return Err(Refusal::Operand(text.text(2)?.to_owned()));
    }
    let real_bytes = if operands == 4 {
        real_bytes(text)?
    } else {
        Source::Constant(bytes)
    };
    let (to, from): (Address, Address) = (text.address(0)?, text.address(1)?);
    Ok(Op::CopyAsync(Box::new(CopyAsync {
        to,
        from,
        bytes: bytes as usize,
        real_bytes,
    })))
}

/// The fourth operand. A predicate there is `ignore-src`, which is not built.
fn real_bytes(text: &Operands<'_>) -> Result<Source, Refusal> {
    let name = text.text(3)?;
    if text
        .names()
        .register(name)
        .is_some_and(|register| register.ty == Type::Pred)
    {
        return Err(Refusal::Operand(name.to_owned()));
    }
    text.source(3, Type::U32)
}

fn constant(text: &Operands<'_>, index: usize) -> Result<u64, Refusal> {
    match text.source(index, Type::U32)? {
        Source::Constant(value) => Ok(value),
        _ => Err(Refusal::Operand(text.text(index)?.to_owned())),
    }
}
