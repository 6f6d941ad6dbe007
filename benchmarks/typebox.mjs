// TypeBox 0.34 on the realistic output: reads {items, dirty} from standard input, prints the rates of each round.
import { readFileSync } from 'node:fs'
import { Type as T } from '@sinclair/typebox'
import { Value } from '@sinclair/typebox/value'

const { dirty } = JSON.parse(readFileSync(0, 'utf8'))
const literal = (value) => T.Literal(value)
const Item = T.Object({
  id: T.Integer(), name: T.String(), status: T.Union(['open', 'closed', 'archived'].map(literal)), score: T.Number(),
  created: T.String(), tags: T.Array(T.String()), active: T.Boolean({ default: true }),
  owner: T.Union([T.String(), T.Null()], { default: null }),
}, { additionalProperties: false })
const Out = T.Array(Item)
const work = () => Value.Check(Out, Value.Cast(Out, dirty))
if (!work()) throw new Error('TypeBox rejects what it cast')
const rate = (ms) => {
  let n = 0, elapsed
  const began = performance.now()
  do { for (let i = 0; i < 50; i++) work(); n += 50; elapsed = performance.now() - began } while (elapsed < ms)
  return n / elapsed * 1e3
}
rate(500)
console.log(rate(Number(process.argv[2] ?? 300)))
